// Package tools is the registry of what a model may call, and the one way in which it is called.
package tools

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unicode/utf8"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"golang.org/x/text/language"
	"golang.org/x/text/message"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	rules "github.com/cordon-host/cordon/capability/session"
	"github.com/cordon-host/cordon/host/route"
)

// MaxArguments is the largest argument text of one call, in bytes. What is larger belongs in a file.
const MaxArguments = 1 << 20

// Definition is a tool and the entry that registered it.
type Definition struct {
	*kernelv1.Tool
	Entry string
}

// DuplicateError is a tool name that is taken.
type DuplicateError struct{ Name, Entry, Owner string }

func (e *DuplicateError) Error() string {
	return fmt.Sprintf("tool %s of %s: %s has registered a tool of that name", e.Name, e.Entry, e.Owner)
}

// Registry holds the tools of the entries that are active.
type Registry struct {
	mu    sync.RWMutex
	tools map[string]*tool
}

type tool struct {
	Definition
	schema   *jsonschema.Schema
	provider func() (*route.Provider, error)
}

// NewRegistry makes an empty registry.
func NewRegistry() *Registry { return &Registry{tools: map[string]*tool{}} }

// Set makes the tools of an entry exactly these, in one step; provider finds the generation to call. It fails, and changes
// nothing, with a *DuplicateError when a name belongs to another entry, or when a schema is not one.
func (r *Registry) Set(entry string, tools []*kernelv1.Tool, provider func() (*route.Provider, error)) error {
	own := map[string]*tool{}
	for _, t := range tools {
		schema, err := compile(t.GetInputSchema())
		if err != nil {
			return fmt.Errorf("tool %s of %s: input schema: %w", t.GetName(), entry, err)
		}
		own[t.GetName()] = &tool{Definition: Definition{t, entry}, schema: schema, provider: provider}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for name := range own {
		if old, ok := r.tools[name]; ok && old.Entry != entry {
			return &DuplicateError{Name: name, Entry: entry, Owner: old.Entry}
		}
	}
	maps.DeleteFunc(r.tools, func(_ string, t *tool) bool { return t.Entry == entry })
	maps.Copy(r.tools, own)
	return nil
}

// List is the tools by name.
func (r *Registry) List() []Definition {
	r.mu.RLock()
	defer r.mu.RUnlock()
	var out []Definition
	for _, name := range slices.Sorted(maps.Keys(r.tools)) {
		out = append(out, r.tools[name].Definition)
	}
	return out
}

func (r *Registry) lookup(name string) (*tool, bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	t, ok := r.tools[name]
	return t, ok
}

func compile(schema []byte) (*jsonschema.Schema, error) {
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(schema))
	if err != nil {
		return nil, err
	}
	c := jsonschema.NewCompiler()
	const url = "tool:input"
	if err := c.AddResource(url, doc); err != nil {
		return nil, err
	}
	return c.Compile(url)
}

// checkArguments accepts a JSON object that is valid against the schema, and returns it in the one form that everybody reads the same
// way: without duplicate keys and whatever else parsers disagree about. Every error names the field.
func (t *tool) checkArguments(raw []byte) ([]byte, error) {
	if err := checkText(raw); err != nil {
		return nil, err
	}
	if !json.Valid(raw) {
		return nil, fmt.Errorf("invalid arguments: not JSON: %s", syntax(raw))
	}
	if trimmed := bytes.TrimLeft(raw, " \t\r\n"); trimmed[0] != '{' {
		return nil, errors.New("invalid arguments: expected a JSON object")
	}
	canonical, err := rules.Canonical(raw)
	var bad *rules.DataError
	if errors.As(err, &bad) {
		return nil, fmt.Errorf("invalid arguments: byte %d: %s", bad.Offset, bad.Reason)
	} else if err != nil {
		return nil, fmt.Errorf("invalid arguments: %w", err)
	}
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(canonical))
	if err != nil {
		return nil, fmt.Errorf("invalid arguments: %w", err)
	}
	if err := checkNumbers(doc, ""); err != nil {
		return nil, fmt.Errorf("invalid arguments: %w", err)
	}
	var invalid *jsonschema.ValidationError
	if err := t.schema.Validate(doc); errors.As(err, &invalid) {
		return nil, fmt.Errorf("invalid arguments: %s", strings.Join(leaves(invalid), "; "))
	} else if err != nil {
		return nil, fmt.Errorf("invalid arguments: %w", err)
	}
	return canonical, nil
}

// Bounds of numbers in arguments: what a schema compares exactly must not cost more than it is worth, and the schema library cannot
// read exponents far outside of a float64's.
const (
	maxDigits   = 400 // characters of one number
	maxExponent = 400
)

// checkNumbers refuses numbers beyond those bounds, and names the field.
func checkNumbers(v any, field string) error {
	join := func(part string) string { return strings.TrimPrefix(field+"."+part, ".") }
	switch v := v.(type) {
	case map[string]any:
		for _, key := range slices.Sorted(maps.Keys(v)) {
			if err := checkNumbers(v[key], join(key)); err != nil {
				return err
			}
		}
	case []any:
		for i, x := range v {
			if err := checkNumbers(x, join(strconv.Itoa(i))); err != nil {
				return err
			}
		}
	case json.Number:
		_, exponent, _ := strings.Cut(strings.ToLower(v.String()), "e")
		n, err := strconv.Atoi(cmp.Or(exponent, "0"))
		if len(v) > maxDigits || err != nil || n > maxExponent || n < -maxExponent {
			return fmt.Errorf("%s: number has too many digits or too large an exponent", field)
		}
	}
	return nil
}

// checkText looks at what can be said before parsing.
func checkText(raw []byte) error {
	if len(raw) > MaxArguments {
		return fmt.Errorf("invalid arguments: %d bytes exceed the limit of %d; put large content in a file", len(raw), MaxArguments)
	}
	if !utf8.Valid(raw) {
		at := 0
		for rest := raw; len(rest) > 0; {
			r, n := utf8.DecodeRune(rest)
			if r == utf8.RuneError && n == 1 {
				break
			}
			at, rest = at+n, rest[n:]
		}
		return fmt.Errorf("invalid arguments: byte %d is not valid UTF-8%s", at, inField(raw[:at]))
	}
	return nil
}

// inField names the top-level field that a cut-off JSON object ends in.
func inField(part []byte) string {
	dec := json.NewDecoder(bytes.NewReader(part))
	field, depth, key := "", 0, false
	for {
		tok, err := dec.Token()
		if err != nil {
			break
		}
		switch v := tok.(type) {
		case json.Delim:
			if v == '{' || v == '[' {
				depth++
			} else {
				depth--
			}
			key = depth == 1
		case string:
			if depth == 1 && key {
				field, key = v, false
				continue
			}
			key = depth == 1
		default:
			key = depth == 1
		}
	}
	if field == "" {
		return ""
	}
	return ", in " + field
}

// syntax says where JSON is broken.
func syntax(raw []byte) string {
	var s *json.SyntaxError
	if err := json.Unmarshal(raw, new(any)); errors.As(err, &s) {
		return fmt.Sprintf("%v at byte %d", err, s.Offset)
	}
	return "it cannot be read"
}

// leaves are the innermost reasons of a validation error, each with its field.
func leaves(e *jsonschema.ValidationError) []string {
	if len(e.Causes) == 0 {
		text := e.ErrorKind.LocalizedString(message.NewPrinter(language.English))
		if len(e.InstanceLocation) == 0 {
			return []string{text}
		}
		return []string{strings.Join(e.InstanceLocation, ".") + ": " + text}
	}
	var out []string
	for _, c := range e.Causes {
		out = append(out, leaves(c)...)
	}
	return out
}
