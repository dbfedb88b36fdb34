//go:build unix && !linux

package fskit

import "golang.org/x/sys/unix"

// openPath opens a directory to work from.
const openPath = unix.O_RDONLY

// descend opens a directory below d without following any link on the way. One that is met is errMoved.
func (d *dir) descend(below string) (*dir, error) { return d.walk(below) }

// stage prepares a place for new content of a file called base, with mode 0600.
func (d *dir) stage(base string) (*stage, error) { return d.stageNamed(base) }

// link is for files without a name, which are not made here.
func (s *stage) link(string) error { return unix.ENOTSUP }

func renameNoReplace(int, string, string) error { return errNoRename }
