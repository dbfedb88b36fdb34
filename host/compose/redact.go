package compose

import (
	"bytes"
	"encoding/json"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"gopkg.in/yaml.v3"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
)

// hide marks a value of the file as one no snippet may show until a schema describes it.
func (p *Plan) hide(n *yaml.Node) { p.hidden = append(p.hidden, n) }

// masks are the stretches of each source that may hold secrets: everything hidden, but for the values of a config that
// the schema of the row's plugin describes and does not mark writeOnly. A row without a schema shows nothing.
func (p *Plan) masks(schemas map[string]*schema) map[*source][]span {
	shown := map[*yaml.Node]bool{}
	for _, e := range p.Entries {
		s := schemas[e.ID]
		if s == nil {
			continue
		}
		for pointer, node := range e.nodes {
			if s.describes(pointer) {
				shown[node.value] = true
			}
		}
	}
	// A node that two rows share through an alias is hidden if either hides it.
	for _, e := range p.Entries {
		for pointer, node := range e.nodes {
			if s := schemas[e.ID]; s != nil && !s.describes(pointer) {
				shown[node.value] = false
				shown[deref(node.value)] = false
			}
		}
	}
	masks := map[*source][]span{}
	for _, src := range p.sources {
		seen := map[*yaml.Node]bool{}
		for _, n := range p.hidden {
			leaves(n, func(leaf *yaml.Node) {
				if !seen[leaf] && !shown[leaf] && !telling(leaf) {
					masks[src] = append(masks[src], src.spanOf(leaf))
				}
				seen[leaf] = true
			})
		}
	}
	return masks
}

// bareVariable is a value that is nothing but the name of a variable.
var bareVariable = regexp.MustCompile(`^\$(\{[A-Za-z_][A-Za-z0-9_]*\}|[A-Za-z_][A-Za-z0-9_]*)$`)

// telling reports whether a value, as it is written, holds nothing to hide: it is absent, or it only names a variable.
func telling(n *yaml.Node) bool {
	return n.Kind == yaml.ScalarNode && (n.Value == "" || bareVariable.MatchString(n.Value))
}

// Redacted is the resolved plan as YAML: variables replaced, groups resolved, and every value that may be a secret given
// as <redacted>. Those are the values of env, a password in the store's address, and every value of a config that the
// schema of the row's plugin marks writeOnly or does not describe.
func (p *Plan) Redacted(manifests map[string]*kernelv1.Manifest) ([]byte, error) {
	root := object("cordon", number(FileVersion), "session", object("store", text(redactedStore(p.Session.Store))))
	list := &yaml.Node{Kind: yaml.SequenceNode}
	for _, e := range p.Entries {
		row := object("id", text(e.ID), "use", text(e.Use))
		var s *schema
		if m := manifests[e.ID]; m != nil {
			compiled, err := compileSchema(m.GetConfigSchema())
			if err != nil {
				return nil, err
			}
			s = compiled
		}
		if e.nodes != nil {
			var config yaml.Node
			if err := yaml.Unmarshal(e.Config, &config); err != nil {
				return nil, err
			}
			put(row, "config", redactedConfig(config.Content[0], "", s))
		}
		if e.Disabled {
			put(row, "disabled", boolean(true))
		}
		if !e.Required {
			put(row, "required", boolean(false))
		}
		put(row, "isolate", texts(e.Isolate))
		env := map[string]string{}
		for name := range e.Env {
			env[name] = maskText
		}
		put(row, "env", texts(env))
		limits := object()
		if e.Limits.Memory > 0 {
			put(limits, "memory", &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!int", Value: strconv.FormatInt(e.Limits.Memory, 10)})
		}
		if e.Limits.Pids > 0 {
			put(limits, "pids", number(e.Limits.Pids))
		}
		put(row, "limits", limits)
		timeouts := object()
		if e.Timeouts.Start > 0 {
			put(timeouts, "start", text(e.Timeouts.Start.String()))
		}
		if e.Timeouts.Drain > 0 {
			put(timeouts, "drain", text(e.Timeouts.Drain.String()))
		}
		if e.Timeouts.Beat > 0 {
			put(timeouts, "beat", text(e.Timeouts.Beat.String()))
		}
		put(row, "timeouts", timeouts)
		if e.Answers != AnswersNone {
			put(row, "answers", text(string(e.Answers)))
		}
		list.Content = append(list.Content, row)
	}
	root.Content = append(root.Content, text("plugins"), list)
	var out bytes.Buffer
	enc := yaml.NewEncoder(&out)
	enc.SetIndent(2)
	if err := enc.Encode(root); err != nil {
		return nil, err
	}
	return out.Bytes(), enc.Close()
}

// Secrets are the values of a row that no log may show: those of env, and every value of the config that the schema of its plugin marks
// writeOnly or does not describe.
func (e *Entry) Secrets(m *kernelv1.Manifest) ([]string, error) {
	s, err := compileSchema(m.GetConfigSchema())
	if err != nil {
		return nil, err
	}
	var out []string
	for _, v := range e.Env {
		out = append(out, v)
	}
	var walk func(v any, pointer string, secret bool)
	walk = func(v any, pointer string, secret bool) {
		secret = secret || !s.describes(pointer)
		switch v := v.(type) {
		case map[string]any:
			for name, x := range v {
				walk(x, pointer+"/"+escapePointer(name), secret)
			}
		case []any:
			for i, x := range v {
				walk(x, pointer+"/"+strconv.Itoa(i), secret)
			}
		case string:
			if secret {
				out = append(out, v)
			}
		case json.Number:
			if secret {
				out = append(out, v.String())
			}
		}
	}
	var config any
	dec := json.NewDecoder(bytes.NewReader(e.Config))
	dec.UseNumber()
	if err := dec.Decode(&config); err != nil {
		return nil, err
	}
	walk(config, "", false)
	slices.Sort(out)
	return slices.Compact(out), nil
}

func redactedConfig(n *yaml.Node, pointer string, s *schema) *yaml.Node {
	if !s.describes(pointer) {
		return text(maskText)
	}
	n.Style = 0
	switch n.Kind {
	case yaml.MappingNode:
		for i := 0; i+1 < len(n.Content); i += 2 {
			n.Content[i].Style = 0
			n.Content[i+1] = redactedConfig(n.Content[i+1], pointer+"/"+escapePointer(n.Content[i].Value), s)
		}
	case yaml.SequenceNode:
		for i := range n.Content {
			n.Content[i] = redactedConfig(n.Content[i], pointer+"/"+strconv.Itoa(i), s)
		}
	case yaml.ScalarNode:
		if n.ShortTag() == "!!str" {
			return text(n.Value)
		}
	}
	return n
}

// redactedStore is a store's address without its password.
func redactedStore(store string) string {
	if strings.HasPrefix(store, "sqlite:") {
		return store
	}
	u, err := url.Parse(store)
	if err != nil {
		return maskText
	}
	if _, has := u.User.Password(); has {
		u.User = url.UserPassword(u.User.Username(), "redacted")
	}
	// Connection parameters can carry a password too.
	if u.RawQuery != "" {
		u.RawQuery = "redacted"
	}
	return u.String()
}

func object(pairs ...any) *yaml.Node {
	n := &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map"}
	for i := 0; i+1 < len(pairs); i += 2 {
		n.Content = append(n.Content, text(pairs[i].(string)), pairs[i+1].(*yaml.Node))
	}
	return n
}

// put adds a key, unless its value is an empty mapping.
func put(n *yaml.Node, key string, value *yaml.Node) {
	if value.Kind == yaml.MappingNode && len(value.Content) == 0 && key != "config" {
		return
	}
	n.Content = append(n.Content, text(key), value)
}

// text is a string as YAML of any version reads it as one.
func text(s string) *yaml.Node {
	n := &yaml.Node{}
	if err := n.Encode(s); err != nil {
		n.SetString(s)
	}
	return n
}

func texts(m map[string]string) *yaml.Node {
	n := object()
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	for _, k := range keys {
		n.Content = append(n.Content, text(k), text(m[k]))
	}
	return n
}

func number(i int) *yaml.Node {
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!int", Value: strconv.Itoa(i)}
}

func boolean(b bool) *yaml.Node {
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!bool", Value: strconv.FormatBool(b)}
}
