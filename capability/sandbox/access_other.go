//go:build !unix

package sandbox

import "os"

// searchable reports whether this process may enter dir; where there is no search permission, listing it has to do.
func searchable(dir string) bool {
	d, err := os.Open(dir)
	if err != nil {
		return false
	}
	return d.Close() == nil
}
