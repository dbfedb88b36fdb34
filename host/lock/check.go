package lock

import (
	"fmt"
	"path/filepath"

	"github.com/cordon-host/cordon/host/compose"
)

// Checker holds a composition against its lock file.
type Checker struct {
	File *File // nil when there is no lock file
	Path string
	Plan *compose.Plan
	// Accept is the command with which a person accepts what is there instead.
	Accept string
}

// Programs refuses every row of which the program is not the accepted one, before anything of it is started. Rows without a program,
// such as disabled ones, run nothing.
func (c Checker) Programs(programs map[string]Program) compose.Diagnostics {
	var out compose.Diagnostics
	for _, row := range c.Plan.Entries {
		have, ok := programs[row.ID]
		if !ok {
			continue
		}
		want := c.entry(row.ID)
		switch {
		case want == nil:
			d := c.fail(row, compose.CodeNotLocked, "plugin of %q is not in %s", row.ID, FileName)
			if c.File == nil {
				d.Notes = append(d.Notes, "there is no "+c.Path)
			}
			d.Notes = append(d.Notes, "accepted nothing", "found    "+prefix+have.Executable, "file     "+row.Target)
			out = append(out, c.hint(d))
		case want.Executable != have.Executable:
			d := c.fail(row, compose.CodeLockDigest, "plugin of %q is not the one that %s accepts", row.ID, FileName)
			d.Notes = append(d.Notes, "found    "+prefix+have.Executable, "file     "+row.Target)
			d.Related = append(d.Related, compose.Related{Place: want.places["executable"], Message: "accepted " + prefix + want.Executable})
			d.Notes = append(d.Notes, why(want.Built, have.Built))
			out = append(out, c.hint(d))
		}
	}
	return out
}

// why guesses at the reason for another digest, from what made both.
func why(want, have Toolchain) string {
	none := Toolchain{}
	switch {
	case want == none && have == none:
		return "the file has other contents"
	case want == none:
		return fmt.Sprintf("accepted was a file that was there; this one was built from source by %s", have)
	case have == none:
		return fmt.Sprintf("accepted was a build from source by %s; this file was there", want)
	case want != have:
		return fmt.Sprintf("accepted was built by %s, this one by %s: another toolchain makes another file of the same sources", want, have)
	}
	return "built by the same toolchain: the sources are others"
}

// Interfaces refuses every row of which the program says something else of itself than the accepted one did.
func (c Checker) Interfaces(interfaces map[string]Interface) compose.Diagnostics {
	var out compose.Diagnostics
	for _, row := range c.Plan.Entries {
		have, ok := interfaces[row.ID]
		want := c.entry(row.ID)
		if !ok || want == nil {
			continue // without an entry it has been refused already
		}
		found := differences(&Entry{Program: want.Program, Interface: want.Interface}, &Entry{Program: want.Program, Interface: have})
		if len(found) == 0 {
			continue
		}
		d := c.fail(row, compose.CodeLockInterface, "plugin of %q says something else of itself than %s accepts", row.ID, FileName)
		for _, f := range found {
			place, known := want.places[f.Name]
			if !known {
				place = want.place
			}
			d.Notes = append(d.Notes, fmt.Sprintf("found    %s %s", f.Name, orNothing(f.New)))
			d.Related = append(d.Related, compose.Related{Place: place, Message: fmt.Sprintf("accepted %s %s", f.Name, orNothing(f.Old))})
		}
		d.Notes = append(d.Notes, "file     "+row.Target)
		out = append(out, c.hint(d))
	}
	return out
}

// orNothing is a fact as a line of a diagnostic: plugins choose their versions.
func orNothing(s string) string {
	if s == "" {
		return "nothing"
	}
	return printable(s)
}

func (c Checker) entry(id string) *Entry {
	if c.File == nil {
		return nil
	}
	return c.File.Entries[id]
}

func (c Checker) fail(row *compose.Entry, code compose.Code, format string, args ...any) *compose.Diagnostic {
	return c.Plan.Diagnose(row, "use", code, format, args...)
}

func (c Checker) hint(d *compose.Diagnostic) *compose.Diagnostic {
	d.Hints = append(d.Hints, "look at what it is, then run  "+c.Accept)
	return d
}

// Path is where the lock file of a plan is.
func Path(plan *compose.Plan) string { return filepath.Join(plan.Dir, FileName) }
