package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/spf13/cobra"

	controlv1 "github.com/cordon-host/cordon/api/control/v1"
	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/capability/sandbox"
	"github.com/cordon-host/cordon/host/front/cli/printable"
)

func (a *app) approveCommand() *cobra.Command {
	var code, note, confirm string
	cmd := &cobra.Command{
		Use:   "approve [list | show ID | allow ID | reject ID]",
		Short: "answer what calls ask, on a terminal of its own",
		Long: `Watch the questions of the running host and answer them. While this runs,
calls that ask wait for you; without it, and without another approver, they
are refused at once. Each question is shown in full when it comes, with a
number. These words are understood:

  list                the open questions
  show N              a question again
  allow N             allow it, this once
  reject N [NOTE]     reject it; the note is kept in the log
  quit

With list, show, allow or reject on the command line, that one thing is done
to the questions that are open now, named by their ids. Everything here needs
the one-use code that the host shows on its terminal. With --json the watch
prints a line for each question that is asked or settled.`,
		Example: "  cordon approve",
		Args: func(cmd *cobra.Command, args []string) error {
			switch {
			case len(args) == 0:
				return nil
			case args[0] == "list":
				return exactly("list")(cmd, args)
			case args[0] == "show", args[0] == "allow", args[0] == "reject":
				return exactly(args[0], "ID")(cmd, args)
			}
			return usagef("approve: unknown word %q", args[0]).hint("see cordon approve --help")
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			word, id := "", ""
			switch len(args) {
			case 2:
				id = args[1]
				fallthrough
			case 1:
				word = args[0]
			}
			if err := checkConfirm(confirm); err != nil {
				return err
			}
			if confirm != "" && word != "allow" {
				return usagef("--confirm goes with approve allow")
			}
			if note != "" && word != "reject" {
				return usagef("--note goes with approve reject")
			}
			switch ctx := cmd.Context(); word {
			case "list":
				return a.inbox(ctx, code, a.printQuestions)
			case "show":
				return a.inbox(ctx, code, func(open []*controlv1.Question) error { return a.printQuestion(open, id) })
			case "allow":
				return a.answerOne(ctx, code, &controlv1.AnswerRequest{Id: id, Outcome: "allowed-once", Confirm: confirm})
			case "reject":
				return a.answerOne(ctx, code, &controlv1.AnswerRequest{Id: id, Outcome: "rejected", Note: note})
			default:
				return a.approve(ctx, code)
			}
		},
	}
	flags := cmd.Flags()
	flags.SortFlags = false
	flags.StringVar(&code, "code", "", "the one-use `code` of the running host (default: ask)")
	flags.StringVar(&note, "note", "", "with reject: a `note` for the model")
	flags.StringVar(&confirm, "confirm", "", "with allow: `danger-full-access` typed out, where that is asked for")
	return cmd
}

// printQuestion shows one of the open questions.
func (a *app) printQuestion(open []*controlv1.Question, id string) error {
	i := slices.IndexFunc(open, func(q *controlv1.Question) bool { return q.GetId() == id })
	switch {
	case i < 0:
		return failf(exitFailed, "question %s is not open", id).hint("cordon approve list shows the open ones")
	case a.json:
		return a.printJSON(newQuestionDocument(open[i]))
	}
	show(a.stdout, open[i])
	return nil
}

// loggedIn is a running host with the login of a person, who is asked for the code if there is a terminal to ask at.
func (a *app) loggedIn(ctx context.Context, code string, in *lines) (*attached, error) {
	h, err := a.running(ctx, code)
	if err != nil || h.person {
		return h, err
	}
	if !a.inTTY || !a.errTTY {
		return nil, errors.Join(usagef("approve: --code is missing").hint("the host shows its one-use code on its terminal"), h.close())
	}
	fmt.Fprint(a.stderr, "cordon: the host's one-use code: ")
	code, err = in.next(ctx)
	if err == nil {
		err = h.login(ctx, strings.TrimSpace(code))
	}
	if err != nil {
		return nil, errors.Join(err, h.close())
	}
	return h, nil
}

// inbox reads the open questions.
func (a *app) inbox(ctx context.Context, code string, use func([]*controlv1.Question) error) (err error) {
	h, err := a.loggedIn(ctx, code, &lines{file: a.stdin})
	if err != nil {
		return err
	}
	defer a.detach(h, &err)
	stream, err := h.Inbox(h.with(ctx), &controlv1.InboxRequest{})
	if err != nil {
		return err
	}
	var open []*controlv1.Question
	for {
		e, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return use(open)
		}
		if err != nil {
			return err
		}
		if q := e.GetAsked(); q != nil {
			open = append(open, q)
		}
	}
}

func (a *app) answerOne(ctx context.Context, code string, r *controlv1.AnswerRequest) (err error) {
	h, err := a.loggedIn(ctx, code, &lines{file: a.stdin})
	if err != nil {
		return err
	}
	defer a.detach(h, &err)
	_, err = h.Answer(h.with(ctx), r)
	return err
}

// questionDocument is a question in JSON.
type questionDocument struct {
	ID      string `json:"id"`
	Session string `json:"session"`
	Agent   string `json:"agent"`
	Call    string `json:"call"`
	Tool    string `json:"tool"`
	Reason  string `json:"reason"`
	From    string `json:"from"`
	To      string `json:"to"`
	Kind    string `json:"kind"`
	Text    string `json:"text"`
	Cwd     string `json:"cwd"`
	Asked   int64  `json:"asked"` // ms since 1970
}

func newQuestionDocument(q *controlv1.Question) *questionDocument {
	return &questionDocument{
		ID: q.GetId(), Session: q.GetSession(), Agent: q.GetAgent(), Call: q.GetCall(), Tool: q.GetTool(), Reason: q.GetReason(),
		From: q.GetFrom(), To: q.GetTo(), Kind: q.GetKind(), Text: q.GetText(), Cwd: q.GetCwd(), Asked: q.GetAskedMs(),
	}
}

// settledDocument is the end of a question in JSON.
type settledDocument struct {
	ID      string `json:"id"`
	Outcome string `json:"outcome"`
	Channel string `json:"channel,omitempty"`
}

func (a *app) printQuestions(open []*controlv1.Question) error {
	if a.json {
		doc := struct {
			Questions []*questionDocument `json:"questions"`
		}{[]*questionDocument{}}
		for _, q := range open {
			doc.Questions = append(doc.Questions, newQuestionDocument(q))
		}
		return a.printJSON(doc)
	}
	var rows [][]string
	for _, q := range open {
		rows = append(rows, []string{q.GetId(), clock(q.GetAskedMs()), q.GetTool(), q.GetTo(), q.GetAgent()})
	}
	return a.table([]string{"QUESTION", "ASKED", "TOOL", "FOR", "AGENT"}, rows)
}

// desk is one person's view of the inbox: what was asked, in order, and what is still open.
type desk struct {
	app   *app
	host  *attached
	asked []*controlv1.Question // numbered from 1
	open  map[string]bool
}

func (a *app) approve(ctx context.Context, code string) (err error) {
	in := &lines{file: a.stdin}
	h, err := a.loggedIn(ctx, code, in)
	if err != nil {
		return err
	}
	defer a.detach(h, &err)
	ctx, leave := context.WithCancel(h.with(ctx))
	var readers sync.WaitGroup
	defer func() { leave(); readers.Wait() }()
	stream, err := h.Inbox(ctx, &controlv1.InboxRequest{Follow: true})
	if err != nil {
		return err
	}
	if _, err := stream.Header(); err != nil {
		return err
	}
	if a.json {
		return a.watch(stream)
	}
	a.say("watching; calls that ask wait for you. Type help for the words, an interrupt ends this")

	d := &desk{app: a, host: h, open: map[string]bool{}}
	events := make(chan *controlv1.InboxEvent)
	ended := make(chan error, 2)
	readers.Go(func() {
		for {
			e, err := stream.Recv()
			if err != nil {
				ended <- err
				return
			}
			select {
			case events <- e:
			case <-ctx.Done():
				return
			}
		}
	})
	words := make(chan string)
	readers.Go(func() {
		for {
			line, err := in.next(ctx)
			if err != nil {
				ended <- err
				return
			}
			select {
			case words <- line:
			case <-ctx.Done():
				return
			}
		}
	})
	for {
		select {
		case e := <-events:
			d.event(e)
		case line := <-words:
			if done, err := d.do(ctx, line); done || err != nil {
				return err
			}
		case err := <-ended:
			if errors.Is(err, io.EOF) {
				return nil // the host has stopped, or there is no more input
			}
			return err
		}
	}
}

// watch prints what is asked and settled as JSON lines.
func (a *app) watch(stream inboxStream) error {
	for {
		e, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		var line struct {
			Asked   *questionDocument `json:"asked,omitempty"`
			Settled *settledDocument  `json:"settled,omitempty"`
		}
		if q := e.GetAsked(); q != nil {
			line.Asked = newQuestionDocument(q)
		}
		if s := e.GetSettled(); s != nil {
			line.Settled = &settledDocument{s.GetId(), s.GetOutcome(), s.GetChannel()}
		}
		if err := a.printJSON(line); err != nil {
			return err
		}
	}
}

func (d *desk) event(e *controlv1.InboxEvent) {
	if q := e.GetAsked(); q != nil {
		d.asked = append(d.asked, q)
		d.open[q.GetId()] = true
		d.show(len(d.asked))
	}
	if s := e.GetSettled(); s != nil && d.open[s.GetId()] {
		delete(d.open, s.GetId())
		n := slices.IndexFunc(d.asked, func(q *controlv1.Question) bool { return q.GetId() == s.GetId() })
		fmt.Fprintf(d.app.stdout, "question %d: %s\n", n+1, printable.Line(settled(s)))
	}
}

func (d *desk) show(n int) {
	q := d.asked[n-1]
	fmt.Fprintf(d.app.stdout, "\nquestion %d (%s), %d open:\n", n, printable.Line(q.GetId()), len(d.open))
	show(d.app.stdout, q)
	if sandbox.Mode(q.GetTo()) == sandbox.DangerFullAccess {
		fmt.Fprintf(d.app.stdout, "  answer: allow %d %s, or reject %d\n", n, sandbox.DangerFullAccess, n)
		return
	}
	fmt.Fprintf(d.app.stdout, "  answer: allow %d, or reject %d\n", n, n)
}

// do follows one typed line.
func (d *desk) do(ctx context.Context, line string) (quit bool, err error) {
	word, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
	which, rest, _ := strings.Cut(strings.TrimSpace(rest), " ")
	rest = strings.TrimSpace(rest)
	switch word {
	case "":
	case "quit", "exit":
		return true, nil
	case "list":
		var open []*controlv1.Question
		for i, q := range d.asked {
			if d.open[q.GetId()] {
				open = append(open, q)
				fmt.Fprintf(d.app.stdout, "question %d: %s for %s\n", i+1, printable.Line(q.GetTool()), printable.Line(q.GetTo()))
			}
		}
		if len(open) == 0 {
			fmt.Fprintln(d.app.stdout, "no open questions")
		}
	case "show", "allow", "reject":
		n := d.find(which)
		if n == 0 {
			d.app.say("no open question %q; list shows them", printable.Line(which))
			return false, nil
		}
		if word == "show" {
			d.show(n)
			return false, nil
		}
		return false, d.answer(ctx, word, n, rest)
	default:
		d.app.say("%q is not one of: list, show N, allow N, reject N [NOTE], quit", printable.Line(word))
	}
	return false, nil
}

// find is the number of an open question, 0 for none.
func (d *desk) find(which string) int {
	for i, q := range d.asked {
		if d.open[q.GetId()] && (which == q.GetId() || which == strconv.Itoa(i+1)) {
			return i + 1
		}
	}
	return 0
}

func (d *desk) answer(ctx context.Context, word string, n int, rest string) error {
	q := d.asked[n-1]
	r := &controlv1.AnswerRequest{Id: q.GetId(), Outcome: "rejected", Note: rest}
	if word == "allow" {
		if sandbox.Mode(q.GetTo()) == sandbox.DangerFullAccess && rest != string(sandbox.DangerFullAccess) {
			d.app.say("this one takes away the sandbox; to allow it type: allow %d %s", n, sandbox.DangerFullAccess)
			return nil
		}
		r = &controlv1.AnswerRequest{Id: q.GetId(), Outcome: "allowed-once", Confirm: rest}
	}
	_, err := d.host.Answer(ctx, r)
	if err != nil && ctx.Err() == nil {
		// Somebody else was faster, or the call is gone: the watch goes on.
		d.app.say("warning: answer not taken: %s", printable.Line(fault.Message(err)))
		return nil
	}
	return err
}
