//go:build unix

package fskit

import (
	"bytes"
	"context"
	"errors"
	"io"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/cordon-host/cordon/capability/fs"
)

// binarySample is how much of the start of a file is looked at for a NUL byte, in bytes.
const binarySample = 8192

// Window says which lines of a file to read.
type Window struct {
	Offset   int64 // first line, from 1
	Limit    int64 // number of lines
	MaxBytes int64 // of the selected lines, with a separator between them
	MaxLine  int64 // longer lines are cut, in characters; 0 for no cut
}

// Line is one line, without its end.
type Line struct {
	Number int64
	Text   string
	Cut    bool
}

// Text is what a window shows.
type Text struct {
	Path    string // canonical
	Version string
	Lines   []Line
	Total   int64 // lines in the file
	Capped  bool  // MaxBytes was reached
}

// Read reads a window of a text file's lines. The whole file is gone through, in little memory: it must be text, and its lines
// are counted.
func (f *FS) Read(ctx context.Context, p Policy, name string, w Window) (Text, error) {
	shown := fs.Display(p.Root, name)
	var out Text
	err := f.reading(ctx, p, fs.Read, name, func(loc location, parent *dir, base string) error {
		file, err := parent.open(base)
		if errors.Is(err, errNotRegular) {
			return fs.ErrNotRegularFile(fs.Read, shown)
		}
		if err != nil {
			return err
		}
		defer file.Close()
		st, err := fstat(file)
		if err != nil {
			return err
		}
		out, err = readWindow(reader{ctx, file}, w, shown)
		out.Path, out.Version = loc.view, st.version
		return err
	})
	return out, err
}

// scanner goes through a text by lines, keeping no more of one than it can show.
type scanner struct {
	w     Window
	shown string
	out   Text
	bytes int64

	line  []byte
	chars int64 // in line
	cut   bool
	open  bool // something of the current line was seen
	cr    bool // a CR may turn out to end the line
	rest  []byte
}

func readWindow(r io.Reader, w Window, shown string) (Text, error) {
	s := &scanner{w: w, shown: shown}
	buf := make([]byte, 64<<10)
	sampled, first := 0, true
	for {
		n, err := io.ReadAtLeast(r, buf, 1)
		chunk := buf[:n]
		if look := min(n, binarySample-sampled); look > 0 {
			if bytes.IndexByte(chunk[:look], 0) >= 0 {
				return Text{}, fs.ErrBinary(fs.Read, shown)
			}
			sampled += look
		}
		if err := s.feed(chunk, &first); err != nil {
			return Text{}, err
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			return Text{}, err
		}
	}
	if len(s.rest) > 0 {
		return Text{}, fs.ErrInvalidText(fs.Read, shown)
	}
	if s.open {
		s.flush(false)
	}
	if s.w.Offset > s.out.Total && !s.out.Capped && !(s.out.Total == 0 && s.w.Offset == 1) {
		return Text{}, fs.ErrOutOfRange(shown, w.Offset, s.out.Total)
	}
	return s.out, nil
}

// bom is the byte order mark some editors put before UTF-8 text. It is not a part of the first line.
var bom = []byte("\ufeff")

// feed takes the next bytes of the file. A character that they cut apart waits for the next ones.
func (s *scanner) feed(chunk []byte, first *bool) error {
	if len(s.rest) > 0 {
		chunk = append(s.rest, chunk...)
		s.rest = nil
	}
	if *first && len(chunk) > 0 && len(chunk) < len(bom) && bytes.HasPrefix(bom, chunk) {
		s.rest = slices.Clone(chunk)
		return nil
	}
	if *first && len(chunk) > 0 {
		chunk, *first = bytes.TrimPrefix(chunk, bom), false
	}
	whole := len(chunk)
	for back := 1; back < utf8.UTFMax && back <= len(chunk); back++ {
		if c := chunk[len(chunk)-back]; utf8.RuneStart(c) {
			if !utf8.FullRune(chunk[len(chunk)-back:]) {
				whole = len(chunk) - back
			}
			break
		}
	}
	text := chunk[:whole]
	s.rest = slices.Clone(chunk[whole:])
	if !utf8.Valid(text) {
		return fs.ErrInvalidText(fs.Read, s.shown)
	}
	for len(text) > 0 {
		i := bytes.IndexByte(text, '\n')
		if i < 0 {
			s.add(text)
			break
		}
		s.add(text[:i])
		s.flush(true)
		text = text[i+1:]
	}
	return nil
}

// shows reports whether the current line is one of those asked for.
func (s *scanner) shows() bool {
	return !s.out.Capped && s.out.Total+1 >= s.w.Offset && int64(len(s.out.Lines)) < s.w.Limit
}

// add takes a part of the current line.
func (s *scanner) add(part []byte) {
	if len(part) == 0 {
		return
	}
	s.open = true
	if !s.shows() {
		return
	}
	if s.cr { // it was inside the line
		s.cr = false
		s.keep([]byte{'\r'})
	}
	if part[len(part)-1] == '\r' {
		s.cr, part = true, part[:len(part)-1]
	}
	s.keep(part)
}

// keep takes as much of a line as is shown.
func (s *scanner) keep(part []byte) {
	if len(part) == 0 || s.cut {
		return
	}
	if s.w.MaxLine > 0 && s.chars+int64(len(part)) > s.w.MaxLine {
		// More bytes than characters are left: count.
		end := 0
		for end < len(part) && s.chars < s.w.MaxLine {
			_, size := utf8.DecodeRune(part[end:])
			end += size
			s.chars++
		}
		s.cut, part = end < len(part), part[:end]
	} else {
		s.chars += int64(utf8.RuneCount(part))
	}
	// No line longer than the whole window is shown, so none is kept.
	if int64(len(s.line)) <= s.w.MaxBytes {
		s.line = append(s.line, part...)
	}
}

// flush ends the current line. Ended says that it has a line end, which a CR before it belongs to.
func (s *scanner) flush(ended bool) {
	if s.shows() {
		if s.cr && !ended {
			s.keep([]byte{'\r'})
		}
		size := int64(len(s.line))
		if len(s.out.Lines) > 0 {
			size++
		}
		if s.bytes+size > s.w.MaxBytes {
			s.out.Capped = true
		} else {
			s.bytes += size
			s.out.Lines = append(s.out.Lines, Line{Number: s.out.Total + 1, Text: string(s.line), Cut: s.cut})
		}
	}
	s.out.Total++
	s.line, s.chars, s.cut, s.open, s.cr = s.line[:0], 0, false, false, false
}

// List lists a directory, sorted by name.
func (f *FS) List(ctx context.Context, p Policy, name string) ([]Entry, error) {
	shown := fs.Display(p.Root, name)
	var out []Entry
	err := f.reading(ctx, p, fs.List, name, func(loc location, parent *dir, base string) error {
		if !loc.dir {
			return fs.ErrNotDirectory(fs.List, shown)
		}
		d := parent
		if base != "" {
			var err error
			if d, err = parent.descend(base); err != nil {
				return err
			}
			defer d.close()
		}
		names, err := d.names()
		if err != nil {
			return err
		}
		slices.Sort(names)
		out = make([]Entry, 0, len(names))
		v := newView(p)
		for _, name := range names {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			kind := KindOther
			if st, err := d.lstat(name); err == nil && !st.link {
				kind = st.kind()
			} else if err == nil {
				kind = v.leadsTo(strings.TrimSuffix(loc.view, "/") + "/" + name)
			}
			out = append(out, Entry{Name: name, Kind: kind})
		}
		return nil
	})
	return out, err
}

// leadsTo is the kind of what a link leads to.
func (v *view) leadsTo(link string) string {
	loc, err := v.resolve(link)
	if err != nil || loc.missing > 0 || loc.host == "" || !v.readable(loc) {
		return KindOther
	}
	if st, err := lstatHost(loc.host); err == nil {
		return st.kind()
	}
	return KindOther
}
