//go:build unix

package fskit

import (
	"bytes"
	"context"
	"errors"
	"io"
	iofs "io/fs"
	"os"
	"sort"
	"strings"
	"unicode/utf8"

	"github.com/cordon-host/cordon/capability/fs"
)

// Edit replaces text in a file: one place, or with all every one. Line ends need not match: old and replacement are read as
// if they ended lines as the file does. What is not replaced stays as it is, byte for byte.
//
// A file that changes while it is edited, or is missing, is FS_STALE_VERSION, with or without a version to compare.
func (f *FS) Edit(ctx context.Context, p Policy, name, old, replacement string, all bool, pre Precondition) (Written, error) {
	var out Written
	err := f.mutating(ctx, p, fs.Edit, name, pre.LeadsTo, func(t target) error {
		if t.loc.missing > 0 {
			return fs.ErrChanged(fs.Edit, t.shown)
		}
		return t.within(func(parent *dir, base string) error {
			content, st, err := f.readForEdit(ctx, t, parent, base, pre.Version)
			if err != nil {
				return err
			}
			edited, n, err := replace(content, old, replacement, all, t.shown)
			if err != nil {
				return err
			}
			out, err = f.publish(ctx, t, parent, base, &st, []byte(edited), true)
			out.Replacements = n
			return err
		})
	})
	return out, err
}

// readForEdit is the text of a file, and the status it had while it was read.
func (f *FS) readForEdit(ctx context.Context, t target, parent *dir, base, version string) (string, status, error) {
	file, err := parent.open(base)
	switch {
	case errors.Is(err, errNotRegular):
		return "", status{}, fs.ErrNotRegularFile(fs.Edit, t.shown)
	case errors.Is(err, iofs.ErrNotExist):
		return "", status{}, fs.ErrChanged(fs.Edit, t.shown)
	case err != nil:
		return "", status{}, err
	}
	defer file.Close()
	st, err := fstat(file)
	if err != nil {
		return "", status{}, err
	}
	if version != "" && st.version != version {
		return "", status{}, fs.ErrChanged(fs.Edit, t.shown)
	}
	limit := f.MaxEditBytes
	if limit == 0 {
		limit = DefaultMaxEditBytes
	}
	if st.size > limit {
		return "", status{}, fs.ErrTooLarge(fs.Edit, t.shown, st.size, limit)
	}
	content, err := readAll(ctx, file, limit)
	if err != nil {
		return "", status{}, err
	}
	switch now, err := fstat(file); {
	case err != nil:
		return "", status{}, err
	case int64(len(content)) > limit:
		return "", status{}, fs.ErrContentTooLarge(fs.Edit, t.shown, limit)
	case now.version != st.version:
		return "", status{}, fs.ErrChanged(fs.Edit, t.shown)
	case bytes.IndexByte(content, 0) >= 0:
		return "", status{}, fs.ErrBinary(fs.Edit, t.shown)
	case !utf8.Valid(content):
		return "", status{}, fs.ErrInvalidText(fs.Edit, t.shown)
	}
	return string(content), st, nil
}

// readAll reads a file, and one byte more than limit if there is more.
func readAll(ctx context.Context, file *os.File, limit int64) ([]byte, error) {
	return io.ReadAll(io.LimitReader(reader{ctx, file}, limit+1))
}

// reader is a reader that ends with its call.
type reader struct {
	ctx context.Context
	r   io.Reader
}

func (r reader) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.r.Read(p)
}

// lineEndSample is how much of the start of a text decides how its lines end, in characters.
const lineEndSample = 4096

// crlf reports whether most of the first lines of a text end in CR LF.
func crlf(text string) bool {
	n := 0
	for i := range text {
		if n++; n > lineEndSample {
			text = text[:i]
			break
		}
	}
	pairs := strings.Count(text, "\r\n")
	return pairs > strings.Count(text, "\n")-pairs
}

func normalized(text string) string { return strings.ReplaceAll(text, "\r\n", "\n") }

// replace is the text with old replaced, and how often it was.
func replace(text, old, replacement string, all bool, shown string) (string, int64, error) {
	old, replacement = normalized(old), normalized(replacement)
	if old == "" {
		return "", 0, fs.ErrEmptyMatch()
	}
	plain := normalized(text)
	n := int64(strings.Count(plain, old))
	switch {
	case n == 0:
		return "", 0, fs.ErrNoMatch(shown)
	case n > 1 && !all:
		return "", 0, fs.ErrAmbiguous(shown, n)
	}
	if crlf(text) {
		replacement = strings.ReplaceAll(replacement, "\n", "\r\n")
	}
	raw := offsets(text)
	var out strings.Builder
	done := 0 // in text
	for at := 0; ; {
		i := strings.Index(plain[at:], old)
		if i < 0 {
			break
		}
		start := at + i
		at = start + len(old)
		out.WriteString(text[done:raw(start)])
		out.WriteString(replacement)
		done = raw(at)
	}
	out.WriteString(text[done:])
	return out.String(), n, nil
}

// offsets maps an offset in the normalized text to the one in text. At a line end it is the one before the CR.
func offsets(text string) func(int) int {
	var ends []int // in the normalized text, of the line ends that were two bytes
	for i, removed := 0, 0; ; removed++ {
		j := strings.Index(text[i:], "\r\n")
		if j < 0 {
			break
		}
		ends = append(ends, i+j-removed)
		i += j + 2
	}
	return func(at int) int { return at + sort.SearchInts(ends, at) }
}
