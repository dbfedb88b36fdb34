package plugin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/hashicorp/go-hclog"
	"google.golang.org/grpc"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	"github.com/cordon-host/cordon/capability/fault"
)

// controlStream is a control stream as a plugin sees it. Its host takes nothing until it is told to.
type controlStream struct {
	grpc.ServerStream
	ctx    context.Context
	toward chan *kernelv1.HostControl
	back   chan *kernelv1.PluginControl
}

func newControlStream(ctx context.Context) *controlStream {
	return &controlStream{ctx: ctx, toward: make(chan *kernelv1.HostControl), back: make(chan *kernelv1.PluginControl)}
}

func (s *controlStream) Context() context.Context { return s.ctx }

func (s *controlStream) Recv() (*kernelv1.HostControl, error) {
	select {
	case f := <-s.toward:
		return f, nil
	case <-s.ctx.Done():
		return nil, io.EOF
	}
}

func (s *controlStream) Send(f *kernelv1.PluginControl) error {
	select {
	case s.back <- f:
		return nil
	case <-s.ctx.Done():
		return s.ctx.Err()
	}
}

var errTest = errors.New("no")

// serving runs a journal's stream; the returned function ends it.
func serving(t *testing.T, j *journal) (*controlStream, func() error) {
	ctx, cancel := context.WithCancel(context.Background())
	s := newControlStream(ctx)
	ended := make(chan error, 1)
	go func() { ended <- j.serve(s) }()
	synctest.Wait()
	var once sync.Once
	var err error
	end := func() error {
		once.Do(func() { cancel(); err = <-ended; synctest.Wait() })
		return err
	}
	return s, end
}

func TestQueueIsBoundedAndCounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var plain bytes.Buffer
		j := newJournal(&plain)
		log := slog.New(j.handler())
		s, end := serving(t, j)
		for i := range queueRecords + 100 {
			log.Info("x", "i", i) // never held up
			if i == 0 {
				synctest.Wait() // this one is on its way
			}
		}
		// A beat goes before all that waits, behind what is on its way.
		s.toward <- &kernelv1.HostControl{Frame: &kernelv1.HostControl_Beat{Beat: &kernelv1.Beat{Number: 7}}}
		synctest.Wait()
		<-s.back
		if b := (<-s.back).GetBeat(); b.GetNumber() != 7 {
			t.Errorf("a beat waits behind the log: %v", b)
		}
		var n int
		for range queueRecords {
			if r := (<-s.back).GetLog(); r != nil && r.GetDropped() == 0 {
				n++
			}
		}
		log.Info("later")
		r := (<-s.back).GetLog()
		if n != queueRecords || r.GetMessage() != "later" || r.GetDropped() != 99 {
			t.Errorf("%d records, then %v", n, r)
		}
		if plain.Len() != 0 {
			t.Errorf("stderr has %q", plain.String())
		}
		if err := end(); err != nil {
			t.Error(err)
		}
	})
}

func TestQueueIsBoundedInBytes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := newJournal(io.Discard)
		_, end := serving(t, j)
		log := slog.New(j.handler())
		for range 100 {
			log.Info(strings.Repeat("x", 1<<20))
		}
		j.mu.Lock()
		if j.bytes > queueBytes || j.dropped < 90 {
			t.Errorf("%d bytes queued, %d dropped", j.bytes, j.dropped)
		}
		j.mu.Unlock()
		_ = end()
	})
}

// Before there is a stream, and after it, records are lines on standard error.
func TestWithoutStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var plain bytes.Buffer
		j := newJournal(&plain)
		log := slog.New(j.handler())
		log.Error("before\nit", "k", "v", "err", errTest)
		s, end := serving(t, j)
		log.Info("on its way")
		synctest.Wait()
		log.Warn("queued")
		_ = s
		_ = end() // the connection broke
		log.Info("after", slog.Group("g", "n", 1))
		var got []map[string]any
		dec := json.NewDecoder(&plain)
		for dec.More() {
			var m map[string]any
			if err := dec.Decode(&m); err != nil {
				t.Fatal(err)
			}
			if _, err := time.Parse("2006-01-02T15:04:05.000000Z07:00", m["@timestamp"].(string)); err != nil {
				t.Error(err)
			}
			delete(m, "@timestamp")
			got = append(got, m)
		}
		want := []map[string]any{
			{"@level": "error", "@message": "before\nit", "k": "v", "err": "no"},
			{"@level": "warn", "@message": "queued"},
			{"@level": "info", "@message": "after", "g": map[string]any{"n": 1.0}},
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Error(d)
		}
	})
}

func TestCloseFlushes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := newJournal(io.Discard)
		log := slog.New(j.handler())
		s, end := serving(t, j)
		log.Info("one")
		log.Info("two")
		closed := make(chan struct{})
		go func() { j.close(time.Hour); close(closed) }()
		synctest.Wait()
		select {
		case <-closed:
			t.Error("closed with records in the queue")
		default:
		}
		if a, b := (<-s.back).GetLog().GetMessage(), (<-s.back).GetLog().GetMessage(); a+b != "onetwo" {
			t.Errorf("%s, %s", a, b)
		}
		<-closed
		if err := end(); err != nil {
			t.Errorf("the stream ended with %v", err)
		}

		// A host that takes nothing does not hold the end up.
		j = newJournal(io.Discard)
		_, end = serving(t, j)
		slog.New(j.handler()).Info("stuck")
		begin := time.Now()
		j.close(flushTimeout)
		if d := time.Since(begin); d != flushTimeout {
			t.Errorf("close took %s", d)
		}
		_ = end()
	})
}

func TestControlLevelAndSecondStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := newJournal(io.Discard)
		s, end := serving(t, j)
		tell := func(level string) {
			s.toward <- &kernelv1.HostControl{Frame: &kernelv1.HostControl_LogLevel{LogLevel: &kernelv1.LogLevel{Level: level}}}
			synctest.Wait()
		}
		log := slog.New(j.handler())
		for _, tt := range []struct {
			level string
			at    slog.Level
		}{{"trace", -8}, {"error", slog.LevelError}, {"of a newer host", slog.LevelInfo}} {
			tell(tt.level)
			if log.Enabled(t.Context(), tt.at-1) || !log.Enabled(t.Context(), tt.at) {
				t.Errorf("level %s is not kept", tt.level)
			}
		}
		s.toward <- &kernelv1.HostControl{} // a frame of a newer host
		if err := j.serve(newControlStream(t.Context())); fault.Reason(err) != "CONTROL_TWICE" {
			t.Errorf("a second stream: %v", err)
		}
		_ = end()
	})
}

func TestHCLogBecomesSlog(t *testing.T) {
	var plain bytes.Buffer
	j := newJournal(&plain)
	j.setLevel("trace")
	var l hclog.Logger = hclogger{log: slog.New(j.handler())}
	l = l.Named("a").Named("b").With("k", 1)
	l.Trace("t", "n", hclog.Hex(255), "f", hclog.Fmt("%d of %d", 1, 2))
	l.StandardLogger(&hclog.StandardLoggerOptions{InferLevels: true}).Print("[WARN] careful")
	l.StandardLogger(&hclog.StandardLoggerOptions{InferLevels: true}).Print("[ERR] broken")
	l.StandardLogger(nil).Print("[x] plain")
	if l.GetLevel() != hclog.Trace || !l.IsTrace() || l.Name() != "a.b" || len(l.ImpliedArgs()) != 2 {
		t.Errorf("level %v, name %s, args %v", l.GetLevel(), l.Name(), l.ImpliedArgs())
	}
	j.setLevel("error")
	l.Warn("too quiet")
	if l.GetLevel() != hclog.Error || l.IsWarn() {
		t.Errorf("level %v", l.GetLevel())
	}
	var got []string
	for line := range strings.Lines(plain.String()) {
		var m map[string]any
		if err := json.Unmarshal([]byte(line), &m); err != nil {
			t.Fatal(err)
		}
		delete(m, "@timestamp")
		out, err := json.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, string(out))
	}
	want := []string{
		`{"@level":"trace","@message":"t","f":"1 of 2","k":1,"module":"a.b","n":"0xff"}`,
		`{"@level":"warn","@message":"careful","k":1,"module":"a.b"}`,
		`{"@level":"error","@message":"broken","k":1,"module":"a.b"}`,
		`{"@level":"info","@message":"[x] plain","k":1,"module":"a.b"}`,
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

// Inside another process there is no stream to be had.
func TestEmbeddedServerHasNoControl(t *testing.T) {
	s := NewServer(Plugin[struct{}]{Name: "x", Version: "1"}, slog.New(slog.DiscardHandler))
	if err := s.Control(newControlStream(t.Context())); err == nil {
		t.Error("a control stream of an embedded server")
	}
}
