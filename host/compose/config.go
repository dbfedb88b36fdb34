package compose

import (
	"bytes"
	"encoding/json"
	"math"
	"regexp"
	"strconv"
	"strings"

	"gopkg.in/yaml.v3"
)

// configNode is where one value of a config is written.
type configNode struct {
	key   *yaml.Node // nil for the root and the items of lists
	value *yaml.Node // not dereferenced: the place of use
}

// jsonNumber is the grammar of numbers in JSON, narrower than that of YAML.
var jsonNumber = regexp.MustCompile(`^-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?$`)

// leadingZero is a number YAML 1.1 reads as octal and YAML 1.2 as decimal.
var leadingZero = regexp.MustCompile(`^[-+]?0[0-9_]+$`)

// config reads the config of a row: YAML with JSON's types, keys in the order of the file.
func (l *loader) config(n *yaml.Node, e *Entry) {
	switch v := deref(n); {
	case v.Kind == yaml.ScalarNode && v.ShortTag() == "!!null":
		return
	case v.Kind != yaml.MappingNode:
		l.wrongType(n, "config", "mapping")
		return
	}
	c := &configReader{loader: l, nodes: map[string]configNode{}}
	before := len(l.diags)
	c.value("", nil, n)
	e.nodes = c.nodes
	e.Config = c.out.Bytes()
	e.broken = c.broken || len(l.diags) > before
}

type configReader struct {
	*loader
	out   bytes.Buffer
	nodes map[string]configNode
	// broken is set if something could not be read, so that the config must not be judged.
	broken bool
}

func (c *configReader) value(pointer string, key, n *yaml.Node) {
	c.nodes[pointer] = configNode{key, n}
	c.broken = c.broken || c.bad[deref(n)]
	switch v := deref(n); v.Kind {
	case yaml.MappingNode:
		names, all := fields(v)
		c.out.WriteByte('{')
		for i, name := range names {
			if i > 0 {
				c.out.WriteByte(',')
			}
			c.string(name)
			c.out.WriteByte(':')
			c.value(pointer+"/"+escapePointer(name), all[name].key, all[name].value)
		}
		c.out.WriteByte('}')
	case yaml.SequenceNode:
		c.out.WriteByte('[')
		for i, item := range v.Content {
			if i > 0 {
				c.out.WriteByte(',')
			}
			c.value(pointer+"/"+strconv.Itoa(i), nil, item)
		}
		c.out.WriteByte(']')
	default:
		c.scalarValue(n)
	}
}

// scalarValue writes one scalar; what has been reported as a mistake is null.
func (c *configReader) scalarValue(n *yaml.Node) {
	tag, text, ok := c.scalar(n)
	if !ok {
		c.out.WriteString("null")
		return
	}
	switch tag {
	case "!!null":
		c.out.WriteString("null")
	case "!!bool":
		c.out.WriteString(strings.ToLower(text))
	case "!!int", "!!float":
		c.number(n, tag, text)
	default:
		c.string(text)
	}
}

func (c *configReader) number(n *yaml.Node, tag, text string) {
	if jsonNumber.MatchString(text) {
		c.out.WriteString(text)
		return
	}
	bad := func(message, hint string) {
		c.fail(n, CodeBadValue, "%s", message).hint("%s", hint)
		c.out.WriteString("null")
	}
	if tag == "!!int" && leadingZero.MatchString(text) {
		bad("a number with a leading zero", "write 0o… for octal, quote it for text")
		return
	}
	var v any
	if err := (&yaml.Node{Kind: yaml.ScalarNode, Tag: tag, Value: text}).Decode(&v); err != nil {
		bad("value is not a number", "remove the tag, or quote the value")
		return
	}
	switch v := v.(type) {
	case int:
		c.out.WriteString(strconv.Itoa(v))
	case int64:
		c.out.WriteString(strconv.FormatInt(v, 10))
	case uint64:
		c.out.WriteString(strconv.FormatUint(v, 10))
	case float64:
		if math.IsInf(v, 0) || math.IsNaN(v) {
			bad("infinity and not-a-number are no JSON numbers", "quote it for text")
			return
		}
		c.out.WriteString(strconv.FormatFloat(v, 'g', -1, 64))
	default:
		bad("value is not a number", "remove the tag, or quote the value")
	}
}

func (c *configReader) string(s string) {
	enc := json.NewEncoder(&c.out)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(s); err != nil {
		panic(err) // a string is always JSON
	}
	c.out.Truncate(c.out.Len() - 1) // the newline Encode adds
}

var pointerEscaper = strings.NewReplacer("~", "~0", "/", "~1")

// escapePointer is name as one token of a JSON pointer (RFC 6901).
func escapePointer(name string) string { return pointerEscaper.Replace(name) }

// leaves calls f with every scalar and alias below n, aliases followed.
func leaves(n *yaml.Node, f func(*yaml.Node)) {
	switch n.Kind {
	case yaml.AliasNode:
		f(n)
		leaves(n.Alias, f)
	case yaml.MappingNode:
		for i := 1; i < len(n.Content); i += 2 {
			leaves(n.Content[i], f)
		}
	case yaml.SequenceNode:
		for _, c := range n.Content {
			leaves(c, f)
		}
	default:
		f(n)
	}
}
