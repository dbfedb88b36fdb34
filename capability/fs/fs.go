// Package fs holds the rules of the fs capability that providers and tools share: what a provider publishes about itself, its
// error codes and their texts, and how a path is spelled for people. Nothing here touches a disk.
//
// Codes and texts come from the reference system's file seam. Models, tools and replays match on them; they stay as
// they are.
package fs

import (
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/cordon-host/cordon/capability/sandbox"
)

// Facts are what a provider of the fs capability publishes about itself.
type Facts struct {
	// SandboxMode is the deployment's default mode; empty for a provider that does not confine.
	SandboxMode sandbox.Mode `json:"sandboxMode,omitempty"`
	// Confines says that every operation runs as the policy capability resolves it.
	Confines bool `json:"confines"`
}

// Display is a path as people and models are shown it: absolute, and without repeated or trailing separators. Cwd is what
// a relative one is relative to. One with `..` in it stays as it was spelled, because what `..` means depends on the links
// before it.
func Display(cwd, path string) string {
	if path == "" {
		return path
	}
	if !filepath.IsAbs(path) {
		// Not filepath.Join: it would collapse `..` before the links are known.
		path = strings.TrimSuffix(cwd, "/") + "/" + path
	}
	if slices.Contains(strings.Split(path, "/"), "..") {
		return path
	}
	return filepath.Clean(path)
}

// quote puts a path in double quotes, as the texts have it. What could end the line or hide is escaped: the path comes from
// a model, and its own texts must not be mistaken for ours.
func quote(path string) string {
	if utf8.ValidString(path) && !strings.ContainsFunc(path, func(r rune) bool { return !unicode.IsGraphic(r) }) {
		return `"` + path + `"`
	}
	return strconv.Quote(path)
}
