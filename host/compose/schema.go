package compose

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/santhosh-tekuri/jsonschema/v6/kind"
)

// schemaURL is the name a config schema has while it is compiled; nothing is ever loaded from it.
const schemaURL = "cordon:config"

// schema is the JSON Schema of one plugin's config.
type schema struct {
	doc      any // as decoded
	compiled *jsonschema.Schema
}

// sealed refuses to load what a schema refers to: a manifest must not make the host read files or the network.
type sealed struct{}

func (sealed) Load(url string) (any, error) {
	return nil, fmt.Errorf("%s is outside the schema", url)
}

// compileSchema reads the schema of a manifest. Without one, every config is valid and none is described.
func compileSchema(text []byte) (*schema, error) {
	if len(bytes.TrimSpace(text)) == 0 {
		return &schema{}, nil
	}
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
	if err != nil {
		return nil, err
	}
	c := jsonschema.NewCompiler()
	c.UseLoader(sealed{})
	c.DefaultDraft(jsonschema.Draft2020)
	if err := c.AddResource(schemaURL, doc); err != nil {
		return nil, err
	}
	compiled, err := c.Compile(schemaURL)
	if err != nil {
		return nil, err
	}
	return &schema{doc, compiled}, nil
}

// violation is one way in which a config does not match its schema.
type violation struct {
	pointer string // of the value
	onKey   bool   // it is the key that is wrong
	message string
	hints   []string
}

// validate finds every violation. Messages tell types and what the schema wants, never the value.
func (s *schema) validate(config []byte) ([]violation, error) {
	if s.compiled == nil {
		return nil, nil
	}
	instance, err := jsonschema.UnmarshalJSON(bytes.NewReader(config))
	if err != nil {
		return nil, err
	}
	err = s.compiled.Validate(instance)
	if err == nil {
		return nil, nil
	}
	var invalid *jsonschema.ValidationError
	if !errors.As(err, &invalid) {
		return nil, err
	}
	v := &validation{schema: s, instance: instance}
	v.flatten(invalid)
	return v.dropMissing(), nil
}

type validation struct {
	*schema
	instance any
	found    []violation
	// meant are required properties that are probably there under a misspelt name, by the pointer of their mapping.
	meant   map[string][]string
	missing []missing
}

type missing struct {
	pointer, name string
}

// dropMissing adds the missing properties but for those that are only misspelt, which is said already.
func (v *validation) dropMissing() []violation {
	for _, m := range v.missing {
		if !slices.Contains(v.meant[m.pointer], m.name) {
			v.add(m.pointer, true, "%q is missing", m.name)
		}
	}
	return v.found
}

func (v *validation) add(pointer string, onKey bool, format string, args ...any) *violation {
	add := violation{pointer: pointer, onKey: onKey, message: fmt.Sprintf(format, args...)}
	for i := range v.found {
		if v.found[i].pointer == add.pointer && v.found[i].message == add.message {
			return &v.found[i]
		}
	}
	v.found = append(v.found, add)
	return &v.found[len(v.found)-1]
}

func (v *validation) flatten(e *jsonschema.ValidationError) {
	pointer := pointerOf(e.InstanceLocation)
	switch k := e.ErrorKind.(type) {
	case *kind.Schema, *kind.Group, *kind.Reference, *kind.AllOf:
		for _, c := range e.Causes {
			v.flatten(c)
		}
		if len(e.Causes) == 0 {
			v.add(pointer, false, "does not match the schema")
		}
	case *kind.AnyOf, *kind.OneOf:
		v.alternatives(pointer, e)
	case *kind.Type:
		want := make([]string, len(k.Want))
		for i, w := range k.Want {
			want[i] = yamlType(w)
		}
		v.add(pointer, false, "got %s, want %s", yamlType(k.Got), strings.Join(want, " or "))
	case *kind.Required:
		for _, name := range k.Missing {
			v.missing = append(v.missing, missing{pointer, name})
		}
	case *kind.AdditionalProperties:
		for _, name := range k.Properties {
			v.unknown(pointer, name)
		}
	case *kind.FalseSchema:
		v.add(pointer, true, "is not allowed here")
	case *kind.Enum:
		want := make([]string, 0, len(k.Want))
		var words []string
		for _, w := range k.Want {
			want = append(want, jsonText(w))
			if s, ok := w.(string); ok {
				words = append(words, s)
			}
		}
		found := v.add(pointer, false, "is none of %s", strings.Join(want, ", "))
		if got, ok := k.Got.(string); ok && v.describes(pointer) {
			if best := closest(got, words); best != "" {
				found.hints = append(found.hints, fmt.Sprintf("did you mean %q?", best))
			}
		}
	case *kind.Const:
		v.add(pointer, false, "must be %s", jsonText(k.Want))
	case *kind.Format:
		v.add(pointer, false, "is not a valid %s", k.Want)
	case *kind.Pattern:
		v.add(pointer, false, "does not match the pattern %q", k.Want)
	case *kind.MinLength:
		v.add(pointer, false, "must have at least %d characters", k.Want)
	case *kind.MaxLength:
		v.add(pointer, false, "must have at most %d characters", k.Want)
	case *kind.Minimum:
		v.add(pointer, false, "must be at least %s", k.Want.RatString())
	case *kind.Maximum:
		v.add(pointer, false, "must be at most %s", k.Want.RatString())
	case *kind.ExclusiveMinimum:
		v.add(pointer, false, "must be more than %s", k.Want.RatString())
	case *kind.ExclusiveMaximum:
		v.add(pointer, false, "must be less than %s", k.Want.RatString())
	case *kind.MultipleOf:
		v.add(pointer, false, "must be a multiple of %s", k.Want.RatString())
	case *kind.MinItems:
		v.add(pointer, false, "must have at least %d items", k.Want)
	case *kind.MaxItems:
		v.add(pointer, false, "must have at most %d items", k.Want)
	case *kind.UniqueItems:
		v.add(pointer, false, "items %d and %d are equal", k.Duplicates[0], k.Duplicates[1])
	case *kind.MinProperties:
		v.add(pointer, false, "must have at least %d keys", k.Want)
	case *kind.MaxProperties:
		v.add(pointer, false, "must have at most %d keys", k.Want)
	case *kind.PropertyNames:
		v.add(pointer+"/"+escapePointer(k.Property), true, "key %q is not allowed", k.Property)
	case *kind.DependentRequired:
		for _, name := range k.Missing {
			v.add(pointer, true, "%q is missing, which %q needs", name, k.Prop)
		}
	default:
		words := e.ErrorKind.KeywordPath()
		v.add(pointer, false, "does not match the schema (%s)", strings.Join(words, "/"))
	}
}

// alternatives explains why none of several forms matched. If the type of the value singles one out, what is wrong is
// said about that one.
func (v *validation) alternatives(pointer string, e *jsonschema.ValidationError) {
	var fit []*jsonschema.ValidationError
	for _, c := range e.Causes {
		if !wrongTypeAt(c, pointer) {
			fit = append(fit, c)
		}
	}
	switch {
	case len(fit) == 1:
		v.flatten(fit[0])
	case len(e.Causes) == 0:
		v.add(pointer, false, "matches more than one of the forms of which it may have one")
	default:
		v.add(pointer, false, "has none of the %d forms it may have", len(e.Causes))
	}
}

func wrongTypeAt(e *jsonschema.ValidationError, pointer string) bool {
	if pointerOf(e.InstanceLocation) != pointer {
		return false
	}
	if _, ok := e.ErrorKind.(*kind.Type); ok {
		return true
	}
	return slices.ContainsFunc(e.Causes, func(c *jsonschema.ValidationError) bool { return wrongTypeAt(c, pointer) })
}

func (v *validation) unknown(pointer, name string) {
	var known []string
	for _, s := range v.at(pointer) {
		if m, ok := s.(map[string]any); ok {
			if p, ok := m["properties"].(map[string]any); ok {
				known = slices.AppendSeq(known, maps.Keys(p))
			}
		}
	}
	slices.Sort(known)
	known = slices.Compact(known)
	found := v.add(pointer+"/"+escapePointer(name), true, "unknown key %q", name)
	if best := closest(name, known); best != "" {
		found.hints = append(found.hints, fmt.Sprintf("did you mean %q?", best))
		if v.meant == nil {
			v.meant = map[string][]string{}
		}
		v.meant[pointer] = append(v.meant[pointer], best)
	} else if len(known) > 0 {
		found.hints = append(found.hints, "known keys: "+strings.Join(known, ", "))
	}
}

// yamlType is the word the file's readers know for a type of JSON.
func yamlType(name string) string {
	switch name {
	case "object":
		return "mapping"
	case "array":
		return "list"
	}
	return name
}

func jsonText(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		return "a value of the schema"
	}
	return string(text)
}

func pointerOf(tokens []string) string {
	var b strings.Builder
	for _, t := range tokens {
		b.WriteByte('/')
		b.WriteString(escapePointer(t))
	}
	return b.String()
}

// describes reports whether the schema describes the value at pointer and neither it nor anything around it is
// writeOnly. Only such values may be shown.
func (s *schema) describes(pointer string) bool {
	at := s.at(pointer)
	return len(at) > 0
}

// at is every subschema that applies to the value at pointer: none if the schema does not describe it, or if it or
// anything around it is writeOnly. Which of several alternatives holds is not asked, so that one that says writeOnly
// is enough.
func (s *schema) at(pointer string) []any {
	if s == nil || s.doc == nil {
		return nil
	}
	now := s.expand([]any{s.doc})
	if pointer == "" {
		return now
	}
	for token := range strings.SplitSeq(pointer[1:], "/") {
		name := strings.NewReplacer("~1", "/", "~0", "~").Replace(token)
		now = s.expand(s.children(now, name))
		if len(now) == 0 {
			return nil
		}
	}
	return now
}

// expand adds what schemas include by reference or combination. It is empty if any of it is writeOnly.
func (s *schema) expand(schemas []any) []any {
	var out []any
	seen := map[string]bool{}
	writeOnly := false
	var add func(any)
	add = func(x any) {
		m, ok := x.(map[string]any)
		if !ok {
			if x == true {
				out = append(out, x)
			}
			return
		}
		if m["writeOnly"] == true {
			writeOnly = true
		}
		out = append(out, m)
		if ref, ok := m["$ref"].(string); ok && !seen[ref] {
			seen[ref] = true
			if target, ok := s.resolve(ref); ok {
				add(target)
			}
		}
		for _, key := range []string{"allOf", "anyOf", "oneOf"} {
			list, _ := m[key].([]any)
			for _, x := range list {
				add(x)
			}
		}
		for _, key := range []string{"if", "then", "else"} {
			if x, ok := m[key]; ok {
				add(x)
			}
		}
		if d, ok := m["dependentSchemas"].(map[string]any); ok {
			for _, x := range d {
				add(x)
			}
		}
	}
	for _, x := range schemas {
		add(x)
	}
	if writeOnly {
		return nil
	}
	return out
}

// resolve follows a reference inside the document.
func (s *schema) resolve(ref string) (any, bool) {
	pointer, ok := strings.CutPrefix(ref, "#")
	if !ok {
		return nil, false
	}
	at := s.doc
	if pointer == "" {
		return at, true
	}
	if pointer[0] != '/' {
		return nil, false
	}
	for token := range strings.SplitSeq(pointer[1:], "/") {
		name := strings.NewReplacer("~1", "/", "~0", "~").Replace(token)
		switch v := at.(type) {
		case map[string]any:
			if at, ok = v[name]; !ok {
				return nil, false
			}
		case []any:
			i, err := strconv.Atoi(name)
			if err != nil || i < 0 || i >= len(v) {
				return nil, false
			}
			at = v[i]
		default:
			return nil, false
		}
	}
	return at, true
}

// shapeKeys are the keywords that say what is inside a mapping or list.
var shapeKeys = []string{"properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "items", "prefixItems", "additionalItems", "unevaluatedItems"}

// children are the subschemas for one key or index of a value to which all of schemas apply. Where none of them says
// anything of what is inside, the inside is described with the whole.
func (s *schema) children(schemas []any, name string) []any {
	var out []any
	shaped := false
	for _, x := range schemas {
		m, ok := x.(map[string]any)
		if !ok {
			continue
		}
		shaped = shaped || slices.ContainsFunc(shapeKeys, func(k string) bool { _, ok := m[k]; return ok })
		matched := false
		if p, ok := m["properties"].(map[string]any); ok {
			if x, ok := p[name]; ok {
				out, matched = append(out, x), true
			}
		}
		if p, ok := m["patternProperties"].(map[string]any); ok {
			for pattern, x := range p {
				if re, err := regexp.Compile(pattern); err == nil && re.MatchString(name) {
					out, matched = append(out, x), true
				}
			}
		}
		if index, err := strconv.Atoi(name); err == nil && index >= 0 {
			prefix, _ := m["prefixItems"].([]any)
			list, _ := m["items"].([]any) // before 2020-12
			prefix = append(slices.Clip(prefix), list...)
			if index < len(prefix) {
				out = append(out, prefix[index])
			} else {
				out = appendSchema(out, m["items"], m["additionalItems"], m["unevaluatedItems"])
			}
		}
		if !matched {
			out = appendSchema(out, m["additionalProperties"], m["unevaluatedProperties"])
		}
	}
	if !shaped && len(schemas) > 0 {
		return []any{true}
	}
	return out
}

// appendSchema appends those of candidates that describe something: an object. A bare true allows and describes nothing.
func appendSchema(out []any, candidates ...any) []any {
	for _, c := range candidates {
		if m, ok := c.(map[string]any); ok {
			out = append(out, m)
		}
	}
	return out
}
