package fs

import (
	"encoding/json"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/capability/sandbox"
)

func TestErrors(t *testing.T) {
	for _, c := range []struct {
		err    error
		code   codes.Code
		reason string
		want   string
	}{
		{ErrNotFound(Read, "/w/a"), codes.NotFound, "FS_NOT_FOUND", `cannot read "/w/a": not found`},
		{ErrNotFound(Stat, "/w/a"), codes.NotFound, "FS_NOT_FOUND", `cannot stat "/w/a": not found`},
		{ErrEmptyPath(), codes.InvalidArgument, "FS_NOT_FOUND", "file_path must be a non-empty string"},
		{ErrParent("/w/f/x"), codes.NotFound, "FS_NOT_FOUND", `cannot resolve "/w/f/x": a parent path segment is not a directory`},
		{ErrOutOfRange("/w/a", 9, 3), codes.OutOfRange, "FS_NOT_FOUND", `offset 9 is out of range for "/w/a" (3 lines)`},
		{ErrNotDirectory(List, "/w/a"), codes.FailedPrecondition, "FS_NOT_DIRECTORY", `cannot list "/w/a": not a directory`},
		{ErrNotRegularFile(Edit, "/w"), codes.FailedPrecondition, "FS_NOT_REGULAR_FILE", `cannot edit "/w": not a regular file`},
		{ErrBinary(Read, "/w/a"), codes.FailedPrecondition, "FS_NOT_TEXT", `cannot read "/w/a": binary file`},
		{ErrInvalidText(Edit, "/w/a"), codes.FailedPrecondition, "FS_NOT_TEXT", `cannot edit "/w/a": invalid UTF-8 text`},
		{ErrTooLarge(Read, "/w/a", 11, 10), codes.ResourceExhausted, "FS_TOO_LARGE", `cannot read "/w/a": 11 bytes exceeds the 10-byte limit`},
		{ErrContentTooLarge(Read, "/w/a", 10), codes.ResourceExhausted, "FS_TOO_LARGE", `cannot read "/w/a": content exceeds the 10-byte limit`},
		{ErrPermission(List, "/w"), codes.PermissionDenied, "FS_PERMISSION_DENIED", `cannot list "/w": permission denied`},
		{ErrSandbox(Write, "/w/a", sandbox.ReadOnly), codes.PermissionDenied, "FS_SANDBOX_DENIED", `cannot write "/w/a": file access denied under read-only mode`},
		{ErrSandbox(Edit, "/w/a", sandbox.WorkspaceWrite), codes.PermissionDenied, "FS_SANDBOX_DENIED", `cannot write "/w/a": file access denied under workspace-write mode`},
		{ErrIO(Write, "/w/a", "no space left on device"), codes.Internal, "FS_IO_ERROR", `cannot write "/w/a": no space left on device`},
		{ErrIO(Write, "/w/a", "100%d"), codes.Internal, "FS_IO_ERROR", `cannot write "/w/a": 100%d`},
		{ErrChanged(Write, "/w/a"), codes.Aborted, "FS_STALE_VERSION", `cannot write "/w/a": file changed since it was read`},
		{ErrChanged(Edit, "/w/a"), codes.Aborted, "FS_STALE_VERSION", `cannot edit "/w/a": file changed since it was read`},
		{ErrGone("/w/a"), codes.Aborted, "FS_STALE_VERSION", `cannot write "/w/a": file no longer exists`},
		{ErrElsewhere(Write, "/w/a"), codes.Aborted, "FS_STALE_VERSION", `cannot write "/w/a": it leads elsewhere by now`},
		{ErrOverwrite("/w/a"), codes.AlreadyExists, "FS_NOT_OBSERVED", `cannot overwrite existing "/w/a" without reading it first`},
		{ErrNoMatch("/w/a"), codes.NotFound, "FS_EDIT_NOT_FOUND", `old_string was not found in "/w/a"`},
		{ErrEmptyMatch(), codes.InvalidArgument, "FS_EDIT_NOT_FOUND", "old_string must be a non-empty string"},
		{ErrAmbiguous("/w/a", 3), codes.FailedPrecondition, "FS_AMBIGUOUS_EDIT", `old_string matched 3 times in "/w/a"; provide a more specific old_string or set replace_all to true`},
		{ErrAborted(Write), codes.Canceled, "FS_ABORTED", "write aborted"},
		// What a path can carry into a text.
		{ErrNotFound(Read, "/w/\u00e9 \"x\""), codes.NotFound, "FS_NOT_FOUND", "cannot read \"/w/\u00e9 \"x\"\": not found"},
		{ErrNotFound(Read, "/w/a\n[sandbox: x]"), codes.NotFound, "FS_NOT_FOUND", `cannot read "/w/a\n[sandbox: x]": not found`},
		{ErrNotFound(Read, "/w/\xff\u202e"), codes.NotFound, "FS_NOT_FOUND", `cannot read "/w/\xff\u202e": not found`},
		{ErrNotFound(Read, "/w/%s"), codes.NotFound, "FS_NOT_FOUND", `cannot read "/w/%s": not found`},
	} {
		if status.Code(c.err) != c.code || fault.Reason(c.err) != c.reason || fault.Message(c.err) != c.want {
			t.Errorf("%v\nwant %v %s: %s", c.err, c.code, c.reason, c.want)
		}
	}
}

func TestRemedy(t *testing.T) {
	for reason, want := range map[string]string{
		StaleVersion: "re-read the file, then retry", NotObserved: "read the file, then retry",
		NotFound: "", SandboxDenied: "", AmbiguousEdit: "", "": "",
	} {
		if got := Remedy(reason); got != want {
			t.Errorf("Remedy(%s) = %q, want %q", reason, got, want)
		}
	}
}

func TestDisplay(t *testing.T) {
	for _, c := range []struct{ cwd, path, want string }{
		{"/w", "a", "/w/a"},
		{"/", "a", "/a"},
		{"/w", "/x//y/./z/", "/x/y/z"},
		{"/w", "a/../b", "/w/a/../b"},
		{"/w", "..a", "/w/..a"},
		{"/w", "/..", "/.."},
		{"/w", "", ""},
	} {
		if got := Display(c.cwd, c.path); got != c.want {
			t.Errorf("Display(%q, %q) = %q, want %q", c.cwd, c.path, got, c.want)
		}
	}
}

func TestFacts(t *testing.T) {
	for want, f := range map[string]Facts{
		`{"sandboxMode":"read-only","confines":true}`: {SandboxMode: sandbox.ReadOnly, Confines: true},
		`{"confines":false}`:                          {},
	} {
		if got, err := json.Marshal(f); err != nil || string(got) != want {
			t.Errorf("%s, %v, want %s", got, err, want)
		}
	}
}
