package sandbox

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// CanonicalPath is the absolute path without symbolic links, as the kernel would walk it: component by component, so that
// `link/..` is the parent of what the link points to. A path that cannot be resolved comes back as it was spelled; it
// then matches nothing until it exists, which is the safe side for a list of grants.
func CanonicalPath(path string) string {
	if path == "" {
		return path
	}
	full := path
	if !filepath.IsAbs(full) {
		wd, err := os.Getwd()
		if err != nil {
			return path
		}
		// Not filepath.Join: it would collapse `..` before the links are known.
		full = wd + string(filepath.Separator) + path
	}
	resolved, err := filepath.EvalSymlinks(full)
	if err != nil {
		return path
	}
	return resolved
}

// WritableRoots are the directories in which a mode allows writing, canonical and without repeats: none unless the mode
// is workspace-write, else the workspace root and the session's temp directory (empty: the call has none). Every
// enforcer takes its roots from here. Under danger-full-access nothing is fenced and nobody may ask.
func WritableRoots(m Mode, root, temp string) []string {
	if m != WorkspaceWrite {
		return nil
	}
	roots := []string{CanonicalPath(root)}
	if temp != "" {
		if t := CanonicalPath(temp); !slices.Contains(roots, t) {
			roots = append(roots, t)
		}
	}
	return roots
}

// SessionTemp is a session's temp directory below the deployment's: commands have it as /tmp, file tools mean it when a
// path says /tmp. It is not made here; whoever makes it does so with mode 0700. A session id that is not a plain file name
// would lead elsewhere and is an error.
func SessionTemp(tempDir, session string) (string, error) {
	if !clean(tempDir) {
		return "", fmt.Errorf("temp directory %q is not an absolute path", tempDir)
	}
	if session == "" || session == "." || session == ".." || strings.ContainsAny(session, "/\x00") || len(session) > 255 {
		return "", fmt.Errorf("session id %q cannot name a directory", session)
	}
	return filepath.Join(tempDir, session), nil
}

// Contains reports whether path is root or below it. Both must be absolute and clean; anything else, like a path that
// still has `..` in it, is contained nowhere. It compares names and follows no links: canonicalise first.
func Contains(root, path string) bool {
	if !clean(root) || !clean(path) {
		return false
	}
	return path == root || strings.HasPrefix(path, strings.TrimSuffix(root, "/")+"/")
}

func clean(p string) bool { return filepath.IsAbs(p) && filepath.Clean(p) == p }
