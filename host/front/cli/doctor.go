package cli

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	controlv1 "github.com/cordon-host/cordon/api/control/v1"
	sandboxv1 "github.com/cordon-host/cordon/api/sandbox/v1"
)

func (a *app) doctorCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "doctor",
		Short: "say which sandbox works on this machine, and why others do not",
		Long: `Probe the sandbox runners of the deployment: which one is used, what it
enforces, and for each that cannot be used why and what to do about it. The
kernel's own settings are listed beside them. Exit code 4 says that no runner
is usable.`,
		Example: "  cordon doctor",
		Args:    exactly(),
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			h, err := a.attach(cmd.Context(), "")
			if err != nil {
				return err
			}
			defer a.detach(h, &err)
			r, err := h.Doctor(cmd.Context(), &controlv1.DoctorRequest{})
			if err != nil {
				return err
			}
			if a.json {
				err = a.printJSON(newDoctorDocument(r, facts()))
			} else {
				err = a.printDoctor(r, facts())
			}
			if err == nil && r.GetSelected() == "" {
				err = exit(exitEnvironment)
			}
			return err
		},
	}
}

// fact is something about this machine that decides which runners work.
type fact struct {
	Name  string `json:"name"`
	Value string `json:"value"`
	// Problem says what does not work because of it, Fix what to do; both are empty when it is as it should be.
	Problem string `json:"problem,omitempty"`
	Fix     string `json:"fix,omitempty"`
}

// doctorDocument is what `doctor --json` prints.
type doctorDocument struct {
	Selected    *string           `json:"selected"`
	Enforcement *doctorEnforced   `json:"enforcement"`
	Runners     []doctorDocRunner `json:"runners"`
	Machine     []fact            `json:"machine"`
}

type doctorEnforced struct {
	Level  string            `json:"level"`
	Rights map[string]string `json:"rights"`
}

type doctorDocRunner struct {
	Name    string `json:"name"`
	Usable  bool   `json:"usable"`
	Version string `json:"version,omitempty"`
	Reason  string `json:"reason,omitempty"`
	Fix     string `json:"fix,omitempty"`
}

func newDoctorDocument(r *sandboxv1.InspectReply, machine []fact) doctorDocument {
	doc := doctorDocument{Runners: []doctorDocRunner{}, Machine: machine}
	if r.GetSelected() != "" {
		doc.Selected = &r.Selected
	}
	if e := r.GetEnforcement(); e != nil {
		doc.Enforcement = &doctorEnforced{e.GetLevel(), e.GetRights()}
	}
	for _, x := range r.GetRunners() {
		doc.Runners = append(doc.Runners, doctorDocRunner{x.GetName(), x.GetUsable(), x.GetVersion(), x.GetReason(), x.GetFix()})
	}
	return doc
}

func (a *app) printDoctor(r *sandboxv1.InspectReply, machine []fact) error {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	if r.GetSelected() == "" {
		line("sandbox: none is usable; confined commands are refused")
	} else {
		line("sandbox: %s, enforcement %s", r.GetSelected(), r.GetEnforcement().GetLevel())
		rights := r.GetEnforcement().GetRights()
		for _, level := range []string{"full", "partial", "none"} {
			var names []string
			for _, name := range slices.Sorted(maps.Keys(rights)) {
				if rights[name] == level {
					names = append(names, name)
				}
			}
			if len(names) > 0 {
				line("  %-8s %s", level+":", strings.Join(names, ", "))
			}
		}
	}
	line("runners:")
	for _, x := range r.GetRunners() {
		state := "usable"
		if !x.GetUsable() {
			state = "not usable"
		}
		line("  %-10s %s", x.GetName(), strings.TrimSpace(state+" "+x.GetVersion()))
		if x.GetReason() != "" {
			line("    why: %s", x.GetReason())
		}
		if x.GetFix() != "" {
			line("    fix: %s", x.GetFix())
		}
	}
	line("machine:")
	for _, f := range machine {
		line("  %s: %s", f.Name, f.Value)
		if f.Problem != "" {
			line("    why: %s", f.Problem)
			line("    fix: %s", f.Fix)
		}
	}
	return a.print("%s", b.String())
}
