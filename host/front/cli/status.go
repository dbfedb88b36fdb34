package cli

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	controlv1 "github.com/cordon-host/cordon/api/control/v1"
)

func (a *app) statusCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "show what the running host runs",
		Long: `Show the entries of the running host: state, generation, process, whether
their code is built in, accepted by compose.lock or neither, what each provides
and needs, why one is not active, its last crash, and why an edit was not
accepted.
It starts no host; exit code 1 says that none runs.`,
		Example: "  cordon status",
		Args:    exactly(),
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			h, err := a.running(cmd.Context(), "")
			if err != nil {
				return err
			}
			defer a.detach(h, &err)
			r, err := h.Status(cmd.Context(), &controlv1.StatusRequest{})
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(newStatusDocument(r))
			}
			return a.printStatus(r)
		},
	}
}

// statusDocument is what `status --json` prints.
type statusDocument struct {
	Deployment string           `json:"deployment"`
	Compose    string           `json:"compose"`
	PID        int64            `json:"pid"`
	Version    string           `json:"version"`
	ReadyMs    int64            `json:"readyMs"`
	Entries    []statusDocEntry `json:"entries"`
	Rejected   string           `json:"rejected,omitempty"`
	Locked     bool             `json:"locked"`
}

type statusDocEntry struct {
	ID         string   `json:"id"`
	Plugin     string   `json:"plugin"`
	Version    string   `json:"version"`
	State      string   `json:"state"`
	Generation uint64   `json:"generation"`
	PID        int64    `json:"pid"`
	Digest     string   `json:"digest"`
	Tier       string   `json:"tier"` // built-in, locked, development
	Provides   []string `json:"provides"`
	Needs      []string `json:"needs"`
	Tools      []string `json:"tools"`
	Listens    []string `json:"listens"`
	Problem    string   `json:"problem,omitempty"`
	Place      string   `json:"place"`
	Crash      *crash   `json:"crash,omitempty"`
}

// crash is the last one of an entry.
type crash struct {
	Time       int64  `json:"time"`
	Generation uint64 `json:"generation"`
	Exit       string `json:"exit"`
	Stderr     string `json:"stderr,omitempty"` // the last lines
	Trace      string `json:"trace,omitempty"`  // the head of it
}

func newCrash(c *controlv1.Crash) *crash {
	if c == nil {
		return nil
	}
	return &crash{c.GetTimeMs(), c.GetGeneration(), c.GetExit(), c.GetStderr(), c.GetTrace()}
}

func newStatusDocument(r *controlv1.StatusReply) statusDocument {
	doc := statusDocument{
		Deployment: r.GetDeployment(), Compose: r.GetCompose(), PID: r.GetPid(), Version: r.GetVersion(), ReadyMs: r.GetReadyMs(),
		Entries: []statusDocEntry{}, Rejected: r.GetRejected(), Locked: r.GetLocked(),
	}
	for _, e := range r.GetEntries() {
		doc.Entries = append(doc.Entries, statusDocEntry{
			ID: e.GetId(), Plugin: e.GetPlugin(), Version: e.GetVersion(), State: e.GetState(), Generation: e.GetGeneration(),
			PID: e.GetPid(), Digest: e.GetDigest(), Tier: e.GetTier(), Provides: list(e.GetProvides()), Needs: list(e.GetNeeds()),
			Tools: list(e.GetTools()), Listens: list(e.GetListens()), Problem: e.GetProblem(), Place: e.GetPlace(), Crash: newCrash(e.GetCrash()),
		})
	}
	return doc
}

func (a *app) printStatus(r *controlv1.StatusReply) error {
	if err := a.print("host %d (%s) of %s\n", r.GetPid(), r.GetVersion(), r.GetCompose()); err != nil {
		return err
	}
	if r.GetRejected() != "" {
		reason := strings.ReplaceAll(strings.TrimSpace(r.GetRejected()), "\n", "\n  ")
		if err := a.print("the newest edit is not accepted, what ran before it serves:\n  %s\n", reason); err != nil {
			return err
		}
	}
	var rows [][]string
	for _, e := range r.GetEntries() {
		pid := ""
		if e.GetPid() > 0 {
			pid = fmt.Sprint(e.GetPid())
		}
		generation := ""
		if e.GetGeneration() > 0 {
			generation = fmt.Sprint(e.GetGeneration())
		}
		gives := e.GetProvides()
		for _, t := range e.GetTools() {
			gives = append(gives, "tool "+t)
		}
		rows = append(rows, []string{
			e.GetId(), e.GetState(), generation, pid, e.GetTier(), strings.Join(gives, ", "), strings.Join(e.GetNeeds(), ", "),
		})
	}
	if err := a.table([]string{"ENTRY", "STATE", "GEN", "PID", "TIER", "PROVIDES", "NEEDS"}, rows); err != nil {
		return err
	}
	for _, e := range r.GetEntries() {
		if e.GetProblem() != "" {
			problem := strings.ReplaceAll(strings.TrimSpace(e.GetProblem()), "\n", "\n  ")
			if err := a.print("%s: %s: %s\n", e.GetPlace(), e.GetId(), problem); err != nil {
				return err
			}
		}
		if err := a.printCrash(e); err != nil {
			return err
		}
	}
	return nil
}

// printCrash prints the last crash of an entry: all that is known while it is a problem, else that there was one.
func (a *app) printCrash(e *controlv1.EntryStatus) error {
	c := e.GetCrash()
	if c == nil {
		return nil
	}
	err := a.print("%s: %s: generation %d crashed at %s: %s\n", e.GetPlace(), e.GetId(), c.GetGeneration(), clock(c.GetTimeMs()), c.GetExit())
	if c.GetTrace() != "" && !strings.Contains(e.GetProblem(), c.GetTrace()) && err == nil {
		err = a.print("%s", indent(c.GetTrace(), "  "))
	}
	return err
}
