package cli

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	controlv1 "github.com/cordon-host/cordon/api/control/v1"
	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/capability/sandbox"
	"github.com/cordon-host/cordon/host/front/cli/printable"
)

// maxArguments is how much of stdin is read for the arguments of a call, in bytes. The host takes less and says so; this
// bounds what is read before anybody can say anything.
const maxArguments = 16 << 20

// settleTime is how long a question stands before an answer is read: less is no time to have read anything, and what was
// typed in it was meant for something else.
const settleTime = 500 * time.Millisecond

type callFlags struct {
	session, cwd, answer, confirm, code string
}

func (a *app) callCommand() *cobra.Command {
	var f callFlags
	cmd := &cobra.Command{
		Use:   "call TOOL [JSON | -]",
		Short: "make one tool call, as a model would",
		Long: `Make one tool call and print its result. The arguments are a JSON object;
- reads them from stdin.

A call that needs a wider sandbox mode asks somebody. With --answer the
person at this terminal has decided beforehand. Without it, and with a
terminal on stdin and stderr, the question is shown there. Otherwise nobody
is asked here, and without another approver the answer is no. Where a host
runs already, deciding needs its one-use code.

A command's non-zero exit is a result: cordon exits 0. Exit code 1 says that
the call failed or was refused, 4 that there is no sandbox for it, 130 that
it was interrupted.`,
		Example: `  cordon call bash '{"command":"ls"}'
  echo '{"command":"date > now.txt", "justification":"keep the time",
    "sandbox_permissions":"workspace-write"}' |
    cordon call bash - --answer allow-once`,
		Args: between(1, "TOOL", "JSON"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := f.check(); err != nil {
				return err
			}
			arguments, err := a.arguments(args[1:])
			if err != nil {
				return err
			}
			return a.call(cmd.Context(), f, args[0], arguments)
		},
	}
	flags := cmd.Flags()
	flags.SortFlags = false
	flags.StringVar(&f.session, "session", "", "the session `id` to call in, or last (default: a new one)")
	flags.StringVar(&f.cwd, "cwd", "", "the `directory` of a new session (default: this one)")
	flags.StringVar(&f.answer, "answer", "", "the `answer` to what the call asks: allow-once or reject")
	flags.StringVar(&f.confirm, "confirm", "", "`danger-full-access` typed out, to allow that")
	flags.StringVar(&f.code, "code", "", "the one-use `code` of the running host")
	return cmd
}

func (f callFlags) check() error {
	switch {
	case f.answer != "" && f.answer != "allow-once" && f.answer != "reject":
		return usagef("--answer must be allow-once or reject, got %q", f.answer)
	case f.confirm != "" && f.answer != "allow-once":
		return usagef("--confirm goes with --answer allow-once")
	case f.session != "" && f.cwd != "":
		return usagef("--cwd is of a new session, --session names an existing one")
	}
	return checkConfirm(f.confirm)
}

func checkConfirm(confirm string) error {
	if confirm != "" && confirm != string(sandbox.DangerFullAccess) {
		return usagef("--confirm must be %s, got %q", sandbox.DangerFullAccess, confirm)
	}
	return nil
}

// arguments are the JSON text of the command line or of stdin.
func (a *app) arguments(args []string) ([]byte, error) {
	switch {
	case len(args) == 0:
		return []byte("{}"), nil
	case args[0] != "-":
		return []byte(args[0]), nil
	}
	text, err := io.ReadAll(io.LimitReader(a.stdin, maxArguments+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("stdin: %w", err)
	case len(text) > maxArguments:
		return nil, failf(exitFailed, "arguments on stdin exceed %d MiB", maxArguments>>20).hint("put large content in a file")
	}
	return text, nil
}

func (a *app) call(ctx context.Context, f callFlags, tool string, arguments []byte) (err error) {
	r := &controlv1.CallRequest{Tool: tool, Arguments: arguments, Answer: f.answer, Confirm: f.confirm, Tag: rand.Text()}
	if f.session == "" {
		if r.Cwd, err = a.path(f.cwd); err != nil {
			return err
		}
		if r.Cwd == "" {
			r.Cwd = a.dir
		}
	}
	h, err := a.attach(ctx, f.code)
	if err != nil {
		return err
	}
	defer a.detach(h, &err)
	ctx = h.with(ctx)
	if r.Session, err = h.session(ctx, f.session); err != nil {
		return err
	}
	var reply *controlv1.CallReply
	if f.answer == "" && h.person && a.inTTY && a.errTTY {
		r.Answer = "ask"
		reply, err = a.askingCall(ctx, h, r)
	} else {
		reply, err = h.Call(ctx, r)
	}
	if err != nil {
		return err
	}
	return a.result(reply)
}

// askingCall makes a call whose questions are shown here. It watches before it calls: a question without a watcher is
// answered at once, with no.
func (a *app) askingCall(ctx context.Context, h *attached, r *controlv1.CallRequest) (*controlv1.CallReply, error) {
	watch, leave := context.WithCancel(ctx)
	defer leave()
	inbox, err := h.Inbox(watch, &controlv1.InboxRequest{Follow: true, Tag: r.GetTag()})
	if err != nil {
		return nil, err
	}
	if _, err := inbox.Header(); err != nil {
		return nil, err
	}
	asked := make(chan error, 1)
	go func() { asked <- a.askAll(watch, h, inbox) }()
	reply, err := h.Call(ctx, r)
	leave()
	if asking := <-asked; err == nil && asking != nil {
		a.say("warning: the questions of this call cannot be shown: %s", printable.Line(fault.Message(asking)))
	}
	return reply, err
}

// askAll shows each question as it comes and passes the answer on, until the stream ends.
func (a *app) askAll(ctx context.Context, h *attached, inbox inboxStream) error {
	in := &lines{file: a.stdin}
	events := make(chan *controlv1.InboxEvent)
	ended := make(chan error, 1)
	go func() {
		defer close(events)
		for {
			e, err := inbox.Recv()
			if err != nil {
				ended <- err
				return
			}
			select {
			case events <- e:
			case <-ctx.Done():
				ended <- nil
				return
			}
		}
	}()
	var waiting []*controlv1.Question
	for {
		if len(waiting) == 0 {
			e, ok := <-events
			if !ok {
				if err := <-ended; ctx.Err() == nil && !errors.Is(err, io.EOF) {
					return err
				}
				return nil
			}
			if q := e.GetAsked(); q != nil {
				waiting = append(waiting, q)
			}
			continue
		}
		q := waiting[0]
		waiting = waiting[1:]
		// Whatever happens while the person thinks: the question may be settled elsewhere, others may come.
		reading, stop := context.WithCancelCause(ctx)
		typed := make(chan *controlv1.AnswerRequest, 1)
		go func() { typed <- a.askOne(reading, in, q) }()
		var said *controlv1.AnswerRequest
		for open := true; open; {
			select {
			case said = <-typed:
				open = false
			case e, ok := <-events:
				switch {
				case !ok:
					stop(io.EOF)
					<-typed
					fmt.Fprintln(a.stderr)
					return nil
				case e.GetAsked() != nil:
					waiting = append(waiting, e.GetAsked())
				case e.GetSettled().GetId() == q.GetId():
					stop(errSettled)
					<-typed
					fmt.Fprintln(a.stderr)
					a.say("the question was settled: %s", printable.Line(settled(e.GetSettled())))
					open = false
				}
			}
		}
		stop(nil)
		if said == nil {
			continue
		}
		if _, err := h.Answer(ctx, said); err != nil && ctx.Err() == nil {
			a.say("warning: answer not taken: %s", printable.Line(fault.Message(err)))
		}
	}
}

type inboxStream interface {
	Recv() (*controlv1.InboxEvent, error)
}

var errSettled = errors.New("settled elsewhere")

// askOne shows a question and reads the answer; nil when there was none to read. No input at all is a no.
func (a *app) askOne(ctx context.Context, in *lines, q *controlv1.Question) *controlv1.AnswerRequest {
	fmt.Fprintln(a.stderr)
	show(a.stderr, q)
	select {
	case <-time.After(settleTime):
	case <-ctx.Done():
		return nil
	}
	in.discard()
	fmt.Fprint(a.stderr, ask(q))
	line, err := in.next(ctx)
	switch {
	case ctx.Err() != nil:
		return nil
	case err != nil:
		fmt.Fprintln(a.stderr)
		line = ""
	}
	return answer(q, line)
}

func settled(s *controlv1.Settled) string {
	if s.GetChannel() == "" {
		return s.GetOutcome()
	}
	return fmt.Sprintf("%s, by %s", s.GetOutcome(), s.GetChannel())
}

// result prints what a call gave.
func (a *app) result(r *controlv1.CallReply) error {
	if a.json {
		doc, err := newCallDocument(r)
		if err != nil {
			return err
		}
		if err := a.printJSON(doc); err != nil {
			return err
		}
	} else if err := a.printTexts(r.GetTexts()); err != nil {
		return err
	}
	switch {
	case !r.GetIsError():
		return nil
	case r.GetErrorCode() == sandbox.ReasonUnavailable:
		a.say("hint: cordon doctor says why no runner is usable")
		return exit(exitEnvironment)
	case r.GetErrorCode() == "TOOL_NOT_FOUND":
		a.say("hint: cordon tools lists the tools")
	}
	return exit(exitFailed)
}

// printTexts prints the texts of a result, each on lines of its own.
func (a *app) printTexts(texts []string) error {
	for _, t := range texts {
		if a.outTTY {
			t = printable.Text(t)
		}
		if t != "" && !strings.HasSuffix(t, "\n") {
			t += "\n"
		}
		if _, err := io.WriteString(a.stdout, t); err != nil {
			return err
		}
	}
	return nil
}

// callDocument is what `call --json` prints.
type callDocument struct {
	IsError bool       `json:"isError"`
	Content []content  `json:"content"`
	Meta    callRecord `json:"meta"`
}

type content struct {
	Type string `json:"type"`
	Text string `json:"text"`
}

// callRecord is the meta of a call: these keys in this order, null where the tool says nothing of the kind, then the code of
// an error, then whatever else the tool adds.
type callRecord map[string]json.RawMessage

var recordKeys = []string{"session", "call", "mode", "denied", "exitCode", "runner", "enforcement"}

func newCallDocument(r *controlv1.CallReply) (callDocument, error) {
	doc := callDocument{IsError: r.GetIsError(), Content: []content{}, Meta: callRecord{}}
	for _, t := range r.GetTexts() {
		doc.Content = append(doc.Content, content{"text", t})
	}
	if len(r.GetMeta()) > 0 {
		if err := json.Unmarshal(r.GetMeta(), &doc.Meta); err != nil {
			return doc, fmt.Errorf("meta of the result is not a JSON object: %w", err)
		}
	}
	for key, value := range map[string]string{"session": r.GetSession(), "call": r.GetCall(), "errorCode": r.GetErrorCode()} {
		delete(doc.Meta, key) // ours, whatever the tool says
		if value == "" {
			continue
		}
		text, err := json.Marshal(value)
		if err != nil {
			return doc, err
		}
		doc.Meta[key] = text
	}
	return doc, nil
}

// MarshalJSON keeps the order of the keys.
func (r callRecord) MarshalJSON() ([]byte, error) {
	keys := slices.Clone(recordKeys)
	if r["errorCode"] != nil {
		keys = append(keys, "errorCode")
	}
	for _, key := range slices.Sorted(maps.Keys(r)) {
		if !slices.Contains(keys, key) {
			keys = append(keys, key)
		}
	}
	b := []byte{'{'}
	for i, key := range keys {
		if i > 0 {
			b = append(b, ',')
		}
		name, err := json.Marshal(key)
		if err != nil {
			return nil, err
		}
		value := r[key]
		if value == nil {
			value = json.RawMessage("null")
		}
		b = append(append(append(b, name...), ':'), value...)
	}
	return append(b, '}'), nil
}
