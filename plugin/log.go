package plugin

import (
	"context"
	"encoding/json"
	"io"
	"log"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	"github.com/cordon-host/cordon/capability/fault"
	rules "github.com/cordon-host/cordon/capability/journal"
)

const (
	// queueRecords and queueBytes bound what waits to be sent. A plugin that logs faster than its host takes it loses records, which are
	// counted, and is never held up.
	queueRecords = 1024
	queueBytes   = 4 << 20
	// queueBeats is how many beats wait to be answered: a host asks for the next one seconds later.
	queueBeats = 8
	// flushTimeout is how long a plugin that stops waits until the host has what is queued.
	flushTimeout = 500 * time.Millisecond
)

// journal is the log of a process. It has one way out: the control stream, with a bounded queue before it. Without a stream, before the
// host opens it and after it ended, records go to standard error, one JSON object a line, as go-plugin's loggers write them.
type journal struct {
	level slog.LevelVar
	wake  chan struct{} // has a token when there is something to send
	beats chan uint64

	mu       sync.Mutex
	plain    io.Writer
	queue    []*kernelv1.LogRecord
	bytes    int
	dropped  uint64        // since the last record that was queued
	attached bool          // a stream takes what is queued
	closing  bool          // the stream ends when the queue is empty
	flushed  chan struct{} // closed when it has
}

func newJournal(plain io.Writer) *journal {
	j := &journal{plain: plain, wake: make(chan struct{}, 1), beats: make(chan uint64, queueBeats), flushed: make(chan struct{})}
	j.level.Set(slog.LevelDebug) // until the host says what it wants
	return j
}

// handler is the journal for slog.
func (j *journal) handler() slog.Handler { return logHandler{journal: j} }

// adopt makes every logger that an author may reach for one of the journal's: slog's, package log's and hclog's defaults.
func (j *journal) adopt(l *slog.Logger) {
	slog.SetDefault(l)
	log.SetFlags(0)
	log.SetOutput(stdWriter{j, l})
	adoptHCLog(l)
}

func (j *journal) setLevel(name string) {
	l, err := rules.ParseLevel(name)
	if err != nil {
		l = slog.LevelInfo // a level of a newer host
	}
	j.level.Set(l)
}

// add takes a record.
func (j *journal) add(r *kernelv1.LogRecord) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if !j.attached {
		j.print(r)
		return
	}
	size := len(r.Message) + len(r.Attributes)
	if len(j.queue) >= queueRecords || j.bytes+size > queueBytes {
		j.dropped++
		return
	}
	r.Dropped, j.dropped = j.dropped, 0
	j.queue = append(j.queue, r)
	j.bytes += size
	j.token()
}

func (j *journal) token() {
	select {
	case j.wake <- struct{}{}:
	default:
	}
}

// print writes a record to standard error. The lock is held.
func (j *journal) print(r *kernelv1.LogRecord) {
	head, err := json.Marshal(struct {
		Level     string `json:"@level"` // first: it must be found in a line that was cut
		Message   string `json:"@message"`
		Timestamp string `json:"@timestamp"`
	}{r.GetLevel(), r.GetMessage(), time.Unix(0, r.GetTimeUnixNano()).Format("2006-01-02T15:04:05.000000Z07:00")})
	if err != nil {
		return // strings are always fit
	}
	line := head
	if rest := strings.TrimPrefix(string(r.GetAttributes()), "{"); len(rest) > 1 {
		line = append(append(head[:len(head)-1], ','), rest...)
	}
	_, _ = j.plain.Write(append(line, '\n')) // there is nowhere else to say it
}

// next is the oldest record in the queue; nil when there is none, and then whether the stream may end.
func (j *journal) next() (r *kernelv1.LogRecord, end bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if len(j.queue) == 0 {
		if j.closing {
			j.attached = false
		}
		return nil, j.closing
	}
	r = j.queue[0]
	j.queue[0] = nil
	j.queue = j.queue[1:]
	j.bytes -= len(r.Message) + len(r.Attributes)
	return r, false
}

// serve is the control stream, from the host's opening it to the end of the process or of the connection.
func (j *journal) serve(stream grpc.BidiStreamingServer[kernelv1.HostControl, kernelv1.PluginControl]) error {
	j.mu.Lock()
	if j.attached || j.closing {
		j.mu.Unlock()
		return fault.New(codes.FailedPrecondition, "CONTROL_TWICE", "control stream: a generation has one")
	}
	j.attached = true
	j.mu.Unlock()
	defer j.detach()

	go func() { // ends with the stream: its context ends when serve returns
		for {
			f, err := stream.Recv()
			if err != nil {
				return
			}
			switch f := f.GetFrame().(type) {
			case *kernelv1.HostControl_LogLevel:
				j.setLevel(f.LogLevel.GetLevel())
			case *kernelv1.HostControl_Beat:
				select {
				case j.beats <- f.Beat.GetNumber():
				default: // as many are on their way
				}
			}
		}
	}()
	for {
		var out *kernelv1.PluginControl
		select {
		case n := <-j.beats: // first: a full queue is no sign of ill health
			out = beat(n)
		default:
			r, end := j.next()
			if end {
				return nil
			}
			if r != nil {
				out = &kernelv1.PluginControl{Frame: &kernelv1.PluginControl_Log{Log: r}}
				break
			}
			select {
			case <-j.wake:
				continue
			case n := <-j.beats:
				out = beat(n)
			case <-stream.Context().Done():
				return nil
			}
		}
		if err := stream.Send(out); err != nil {
			return err
		}
	}
}

func beat(n uint64) *kernelv1.PluginControl {
	return &kernelv1.PluginControl{Frame: &kernelv1.PluginControl_Beat{Beat: &kernelv1.Beat{Number: n}}}
}

// detach sends what is left another way, when the stream is over.
func (j *journal) detach() {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.attached = false
	for _, r := range j.queue {
		j.print(r)
	}
	j.queue, j.bytes = nil, 0
	select {
	case <-j.flushed:
	default:
		close(j.flushed)
	}
}

// close lets the stream end when everything was sent, and waits for that, but not for long. What is logged later goes to standard error.
func (j *journal) close(wait time.Duration) {
	j.mu.Lock()
	j.closing = true
	attached := j.attached
	j.mu.Unlock()
	if !attached {
		return
	}
	j.token()
	t := time.NewTimer(wait)
	defer t.Stop()
	select {
	case <-j.flushed:
	case <-t.C:
	}
}

// logHandler is the journal as slog sees it.
type logHandler struct {
	journal *journal
	scope   rules.Scope
}

func (h logHandler) Enabled(_ context.Context, l slog.Level) bool {
	return l >= h.journal.level.Level()
}

func (h logHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	h.scope = h.scope.Attrs(attrs)
	return h
}

func (h logHandler) WithGroup(name string) slog.Handler {
	h.scope = h.scope.Group(name)
	return h
}

func (h logHandler) Handle(_ context.Context, r slog.Record) error {
	message, attributes, cut := rules.Cut(r.Message, h.scope.JSON(r))
	out := &kernelv1.LogRecord{Level: rules.LevelName(r.Level), Message: message, Attributes: attributes, Truncated: cut}
	if !r.Time.IsZero() {
		out.TimeUnixNano = r.Time.UnixNano()
	}
	h.journal.add(out)
	return nil
}

// stdWriter is where package log writes. What its Fatal functions say, as they end the process, goes to standard error: nobody would be there
// to send it, and the host quotes it as the process's last words.
type stdWriter struct {
	journal *journal
	log     *slog.Logger
}

func (w stdWriter) Write(p []byte) (int, error) {
	if fatal() {
		w.journal.mu.Lock()
		defer w.journal.mu.Unlock()
		return w.journal.plain.Write(p)
	}
	w.log.Info(strings.TrimSuffix(string(p), "\n"))
	return len(p), nil
}

// fatal reports whether the caller is about to end the process.
func fatal() bool {
	var pcs [12]uintptr // the writer is called a few frames below the function an author called
	frames := runtime.CallersFrames(pcs[:runtime.Callers(3, pcs[:])])
	for {
		f, more := frames.Next()
		if strings.HasPrefix(f.Function, "log.Fatal") || strings.HasPrefix(f.Function, "log.(*Logger).Fatal") {
			return true
		}
		if !more {
			return false
		}
	}
}

// Interface guard.
var _ slog.Handler = logHandler{}
