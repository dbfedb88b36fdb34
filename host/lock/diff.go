package lock

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Change is what accepting would change about one row.
type Change struct {
	Entry string `json:"entry"`
	Kind  Kind   `json:"change"`
	// Values are the facts that differ, in the order of the file.
	Values []Difference `json:"values"`
}

// Kind is the kind of a change.
type Kind string

const (
	Added   Kind = "added"
	Removed Kind = "removed"
	Changed Kind = "changed"
)

// Difference is one fact before and after; empty where there was or will be none.
type Difference struct {
	Name string `json:"name"`
	Old  string `json:"old,omitempty"`
	New  string `json:"new,omitempty"`
}

// Diff is what makes next out of old, in the order of the ids. old may be nil: no lock file is one without entries.
func Diff(old, next *File) []Change {
	if old == nil {
		old = &File{}
	}
	ids := maps.Clone(old.Entries)
	if ids == nil {
		ids = map[string]*Entry{}
	}
	maps.Copy(ids, next.Entries)
	var out []Change
	for _, id := range slices.Sorted(maps.Keys(ids)) {
		was, is := old.Entries[id], next.Entries[id]
		c := Change{Entry: id, Kind: Changed, Values: differences(was, is)}
		switch {
		case was == nil:
			c.Kind = Added
		case is == nil:
			c.Kind = Removed
		case len(c.Values) == 0:
			continue
		}
		out = append(out, c)
	}
	return out
}

func differences(was, is *Entry) []Difference {
	out := []Difference{}
	before := map[string]string{}
	if was != nil {
		for _, v := range was.values() {
			before[v.name] = v.text
		}
	}
	if is != nil {
		for _, v := range is.values() {
			if old, known := before[v.name]; !known || old != v.text {
				out = append(out, Difference{Name: v.name, Old: old, New: v.text})
			}
			delete(before, v.name)
		}
	}
	if was != nil {
		for _, v := range was.values() {
			if _, left := before[v.name]; left {
				out = append(out, Difference{Name: v.name, Old: v.text})
			}
		}
	}
	return out
}

// shortDigest is how many digits of a digest a person is shown: enough to tell two builds apart, not to accept one.
const shortDigest = 12

// Short is a fact as a person reads it: a digest is cut.
func Short(text string) string {
	if sum, ok := strings.CutPrefix(text, prefix); ok && hexDigest.MatchString(sum) {
		return prefix + sum[:shortDigest] + "…"
	}
	return text
}

// Text is a change for people, a line for the row and one for each fact.
func (c Change) Text() string {
	var b strings.Builder
	mark := map[Kind]string{Added: "+", Removed: "-", Changed: "~"}[c.Kind]
	fmt.Fprintf(&b, "%s %s\n", mark, c.Entry)
	for _, d := range c.Values {
		switch {
		case d.Old == "":
			fmt.Fprintf(&b, "    %s: %s\n", d.Name, Short(d.New))
		case d.New == "":
			fmt.Fprintf(&b, "    %s: %s, gone\n", d.Name, Short(d.Old))
		default:
			fmt.Fprintf(&b, "    %s: %s -> %s\n", d.Name, Short(d.Old), Short(d.New))
		}
	}
	return b.String()
}
