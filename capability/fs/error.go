package fs

import (
	"fmt"

	"google.golang.org/grpc/codes"

	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/capability/sandbox"
)

// The reasons of the faults of this capability. The list is closed.
const (
	NotFound         = "FS_NOT_FOUND"
	NotDirectory     = "FS_NOT_DIRECTORY"
	NotText          = "FS_NOT_TEXT"
	NotRegularFile   = "FS_NOT_REGULAR_FILE"
	TooLarge         = "FS_TOO_LARGE"
	PermissionDenied = "FS_PERMISSION_DENIED"
	SandboxDenied    = "FS_SANDBOX_DENIED" // the policy said no, not the host
	IOError          = "FS_IO_ERROR"
	StaleVersion     = "FS_STALE_VERSION"
	NotObserved      = "FS_NOT_OBSERVED"
	AmbiguousEdit    = "FS_AMBIGUOUS_EDIT"
	EditNotFound     = "FS_EDIT_NOT_FOUND"
	Aborted          = "FS_ABORTED"
)

// Op is an operation, as its texts name it.
type Op string

const (
	Resolve Op = "resolve"
	Stat    Op = "stat"
	Read    Op = "read"
	List    Op = "list"
	Write   Op = "write"
	Edit    Op = "edit"
)

func cannot(op Op, path string, code codes.Code, reason, format string, args ...any) error {
	return fault.New(code, reason, "cannot %s %s: %s", op, quote(path), fmt.Sprintf(format, args...))
}

// ErrNotFound is FS_NOT_FOUND for a path where nothing is.
func ErrNotFound(op Op, path string) error {
	return cannot(op, path, codes.NotFound, NotFound, "not found")
}

// ErrEmptyPath is FS_NOT_FOUND for a path without a visible character.
func ErrEmptyPath() error {
	return fault.New(codes.InvalidArgument, NotFound, "file_path must be a non-empty string")
}

// ErrParent is FS_NOT_FOUND for a path that leads through something that is no directory.
func ErrParent(path string) error {
	return fault.New(codes.NotFound, NotFound, "cannot resolve %s: a parent path segment is not a directory", quote(path))
}

// ErrOutOfRange is FS_NOT_FOUND for a first line, from 1, behind the last one.
func ErrOutOfRange(path string, offset, lines int64) error {
	return fault.New(codes.OutOfRange, NotFound, "offset %d is out of range for %s (%d lines)", offset, quote(path), lines)
}

// ErrNotDirectory is FS_NOT_DIRECTORY.
func ErrNotDirectory(op Op, path string) error {
	return cannot(op, path, codes.FailedPrecondition, NotDirectory, "not a directory")
}

// ErrNotRegularFile is FS_NOT_REGULAR_FILE for a directory, device, socket or pipe.
func ErrNotRegularFile(op Op, path string) error {
	return cannot(op, path, codes.FailedPrecondition, NotRegularFile, "not a regular file")
}

// ErrBinary is FS_NOT_TEXT for a file with a NUL byte.
func ErrBinary(op Op, path string) error {
	return cannot(op, path, codes.FailedPrecondition, NotText, "binary file")
}

// ErrInvalidText is FS_NOT_TEXT for a file that is not UTF-8.
func ErrInvalidText(op Op, path string) error {
	return cannot(op, path, codes.FailedPrecondition, NotText, "invalid UTF-8 text")
}

// ErrTooLarge is FS_TOO_LARGE for a file of more bytes than the operation takes.
func ErrTooLarge(op Op, path string, bytes, limit int64) error {
	return cannot(op, path, codes.ResourceExhausted, TooLarge, "%d bytes exceeds the %d-byte limit", bytes, limit)
}

// ErrContentTooLarge is FS_TOO_LARGE for content whose end was not reached within the limit.
func ErrContentTooLarge(op Op, path string, limit int64) error {
	return cannot(op, path, codes.ResourceExhausted, TooLarge, "content exceeds the %d-byte limit", limit)
}

// ErrPermission is FS_PERMISSION_DENIED: the host's own permissions say no.
func ErrPermission(op Op, path string) error {
	return cannot(op, path, codes.PermissionDenied, PermissionDenied, "permission denied")
}

// ErrSandbox is FS_SANDBOX_DENIED. An edit is a write to the policy, and its text says so.
func ErrSandbox(op Op, path string, mode sandbox.Mode) error {
	if op == Edit {
		op = Write
	}
	return cannot(op, path, codes.PermissionDenied, SandboxDenied, "file access denied under %s mode", mode)
}

// ErrIO is FS_IO_ERROR with what the operating system said.
func ErrIO(op Op, path, detail string) error {
	return cannot(op, path, codes.Internal, IOError, "%s", detail)
}

// ErrChanged is FS_STALE_VERSION for a file that is not what the caller has seen. An edit of a missing file is one, too.
func ErrChanged(op Op, path string) error {
	return cannot(op, path, codes.Aborted, StaleVersion, "file changed since it was read")
}

// ErrGone is FS_STALE_VERSION for a replacement of a file that is not there any more.
func ErrGone(path string) error {
	return cannot(Write, path, codes.Aborted, StaleVersion, "file no longer exists")
}

// ErrElsewhere is FS_STALE_VERSION for a path that does not lead where somebody was told it does.
func ErrElsewhere(op Op, path string) error {
	return cannot(op, path, codes.Aborted, StaleVersion, "it leads elsewhere by now")
}

// ErrOverwrite is FS_NOT_OBSERVED for a file that was to be created and exists.
func ErrOverwrite(path string) error {
	return fault.New(codes.AlreadyExists, NotObserved, "cannot overwrite existing %s without reading it first", quote(path))
}

// ErrNoMatch is FS_EDIT_NOT_FOUND.
func ErrNoMatch(path string) error {
	return fault.New(codes.NotFound, EditNotFound, "old_string was not found in %s", quote(path))
}

// ErrEmptyMatch is FS_EDIT_NOT_FOUND for an edit that looks for nothing.
func ErrEmptyMatch() error {
	return fault.New(codes.InvalidArgument, EditNotFound, "old_string must be a non-empty string")
}

// ErrAmbiguous is FS_AMBIGUOUS_EDIT for an old string that is there more than once.
func ErrAmbiguous(path string, matches int64) error {
	return fault.New(codes.FailedPrecondition, AmbiguousEdit,
		"old_string matched %d times in %s; provide a more specific old_string or set replace_all to true", matches, quote(path))
}

// ErrAborted is FS_ABORTED: the caller gave up, and nothing was changed.
func ErrAborted(op Op) error {
	return fault.New(codes.Canceled, Aborted, "%s aborted", op)
}

// Remedy is what a model can do about a fault; empty when there is nothing to say.
func Remedy(reason string) string {
	switch reason {
	case StaleVersion:
		return "re-read the file, then retry"
	case NotObserved:
		return "read the file, then retry"
	}
	return ""
}
