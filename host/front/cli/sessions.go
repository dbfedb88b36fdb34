package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	controlv1 "github.com/cordon-host/cordon/api/control/v1"
	"github.com/cordon-host/cordon/capability/approval"
	"github.com/cordon-host/cordon/capability/sandbox"
)

// lastSession stands for the newest session where an id is wanted.
const lastSession = "last"

// session resolves what a person calls a session.
func (h *attached) session(ctx context.Context, name string) (string, error) {
	if name != lastSession {
		return name, nil
	}
	r, err := h.ListSessions(ctx, &controlv1.ListSessionsRequest{})
	if err != nil {
		return "", err
	}
	var last *controlv1.SessionInfo
	for _, s := range r.GetSessions() {
		// Ids of sessions made in the same millisecond sort by age.
		if last == nil || s.GetCreatedMs() > last.GetCreatedMs() ||
			s.GetCreatedMs() == last.GetCreatedMs() && s.GetId() > last.GetId() {
			last = s
		}
	}
	if last == nil {
		return "", failf(exitFailed, "there are no sessions yet").hint("cordon call makes one")
	}
	return last.GetId(), nil
}

func (a *app) sessionsCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "sessions",
		Short:   "list the sessions",
		Long:    "List the sessions of the deployment. Each is an event log; see cordon log.",
		Example: "  cordon sessions",
		Args:    exactly(),
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			ctx := cmd.Context()
			h, err := a.attach(ctx, "")
			if err != nil {
				return err
			}
			defer a.detach(h, &err)
			r, err := h.ListSessions(ctx, &controlv1.ListSessionsRequest{})
			if err != nil {
				return err
			}
			return a.printSessions(r.GetSessions())
		},
	}
}

func (a *app) printSessions(sessions []*controlv1.SessionInfo) error {
	if a.json {
		type session struct {
			ID      string `json:"id"`
			Cwd     string `json:"cwd"`
			Created int64  `json:"created"` // ms since 1970
			Events  int64  `json:"events"`
			Live    bool   `json:"live"`
		}
		doc := struct {
			Sessions []session `json:"sessions"`
		}{[]session{}}
		for _, s := range sessions {
			doc.Sessions = append(doc.Sessions, session{s.GetId(), s.GetCwd(), s.GetCreatedMs(), s.GetEvents(), s.GetLive()})
		}
		return a.printJSON(doc)
	}
	var rows [][]string
	for _, s := range sessions {
		live := ""
		if s.GetLive() {
			live = "yes"
		}
		rows = append(rows, []string{s.GetId(), clock(s.GetCreatedMs()), fmt.Sprint(s.GetEvents()), live, s.GetCwd()})
	}
	return a.table([]string{"SESSION", "CREATED", "EVENTS", "LIVE", "CWD"}, rows)
}

func (a *app) logCommand() *cobra.Command {
	var follow bool
	cmd := &cobra.Command{
		Use:   "log SESSION",
		Short: "print the event log of a session",
		Long: `Print the event log of a session: number, time, turn, type and data of each
event. SESSION is an id or "last". With --json each line is an object with
"seq", "time" (milliseconds since 1970), "type", "turn", "data" and "hash".`,
		Example: "  cordon log last",
		Args:    exactly("SESSION"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.log(cmd.Context(), args[0], follow)
		},
	}
	cmd.Flags().BoolVar(&follow, "follow", false, "wait for more events of the running host, until interrupted")
	return cmd
}

func (a *app) log(ctx context.Context, name string, follow bool) (err error) {
	attach := a.attach
	if follow {
		attach = a.running // in a host of its own nothing more would come
	}
	h, err := attach(ctx, "")
	if err != nil {
		return err
	}
	defer a.detach(h, &err)
	id, err := h.session(ctx, name)
	if err != nil {
		return err
	}
	stream, err := h.ReadLog(ctx, &controlv1.ReadLogRequest{Session: id, Follow: follow})
	if err != nil {
		return err
	}
	for {
		e, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			err = a.printEvent(e)
		}
		if err != nil {
			return err
		}
	}
}

func (a *app) printEvent(e *controlv1.LogEvent) error {
	if a.json {
		return a.printJSON(struct {
			Seq  int64           `json:"seq"`
			Time int64           `json:"time"`
			Type string          `json:"type"`
			Turn int64           `json:"turn"`
			Data json.RawMessage `json:"data"`
			Hash string          `json:"hash"`
		}{e.GetSeq(), e.GetTimeMs(), e.GetType(), e.GetTurn(), e.GetData(), e.GetHash()})
	}
	turn := "-"
	if e.GetTurn() > 0 {
		turn = fmt.Sprint(e.GetTurn())
	}
	return a.print("%4d  %s  %3s  %-16s  %s\n", e.GetSeq(), clock(e.GetTimeMs()), turn, e.GetType(), e.GetData())
}

func (a *app) modeCommand() *cobra.Command {
	var confirm, code string
	cmd := &cobra.Command{
		Use:   "mode SESSION [MODE]",
		Short: "show or switch what a session's commands may change",
		Long: `Show or switch the sandbox mode of a session: read-only, workspace-write or
danger-full-access. SESSION is an id or "last".

Narrowing is always possible. Widening needs a person: whoever started the
host, or its one-use code where it runs already. danger-full-access also
needs --confirm danger-full-access.`,
		Example: "  cordon mode last read-only",
		Args:    between(1, "SESSION", "MODE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 1 {
				if _, err := sandbox.ParseMode(args[1]); err != nil {
					return usagef("%w", err)
				}
			}
			if err := checkConfirm(confirm); err != nil {
				return err
			}
			return a.knob(cmd.Context(), "mode", args, confirm, code)
		},
	}
	cmd.Flags().StringVar(&confirm, "confirm", "", "`danger-full-access` typed out, to switch to that")
	cmd.Flags().StringVar(&code, "code", "", "the one-use `code` of the running host")
	return cmd
}

func (a *app) approvalCommand() *cobra.Command {
	var code string
	cmd := &cobra.Command{
		Use:   "approval SESSION [POLICY]",
		Short: "show or switch whether a session may ask",
		Long: `Show or switch the approval policy of a session: with ask somebody is asked,
with never the answer is no before anybody hears of the question. SESSION is
an id or "last".`,
		Example: "  cordon approval last never",
		Args:    between(1, "SESSION", "POLICY"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 1 {
				if _, err := approval.ParsePolicy(args[1]); err != nil {
					return usagef("%w", err)
				}
			}
			return a.knob(cmd.Context(), "approval", args, "", code)
		},
	}
	cmd.Flags().StringVar(&code, "code", "", "the one-use `code` of the running host")
	return cmd
}

// knob shows a setting of a session, or switches it and says nothing.
func (a *app) knob(ctx context.Context, name string, args []string, confirm, code string) (err error) {
	h, err := a.attach(ctx, code)
	if err != nil {
		return err
	}
	defer a.detach(h, &err)
	ctx = h.with(ctx)
	id, err := h.session(ctx, args[0])
	if err != nil {
		return err
	}
	req := &controlv1.KnobRequest{Session: id, Knob: name, Confirm: confirm}
	if len(args) > 1 {
		req.Value = args[1]
	}
	r, err := h.Knob(ctx, req)
	switch {
	case err != nil:
		return err
	case a.json:
		return a.printJSON(struct {
			Session string `json:"session"`
			Knob    string `json:"knob"`
			Value   string `json:"value"`
			Source  string `json:"source"`
			Changed bool   `json:"changed"`
		}{id, name, r.GetValue(), r.GetSource(), r.GetChanged()})
	case req.Value == "":
		return a.print("%s\n", r.GetValue())
	}
	return nil
}
