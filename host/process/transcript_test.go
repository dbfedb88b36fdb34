package process

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cordon-host/cordon/host/logs"
)

func kept(t *testing.T, b *logs.Book) (out []logs.Record) {
	t.Helper()
	if err := b.Read(t.Context(), logs.Query{Level: -100, Tail: -1}, func(r logs.Record) error { out = append(out, r); return nil }); err != nil {
		t.Fatal(err)
	}
	return out
}

func TestTranscriptIsBounded(t *testing.T) {
	b := logs.NewBook(slog.DiscardHandler, slog.LevelInfo)
	tr := &transcript{log: b.Writer("a", 1)}
	for i := range 100 {
		tr.stderr(fmt.Appendf(nil, "line %d %s", i, strings.Repeat("x", 100<<10)), false)
	}
	tr.stderr([]byte("panic: long"), false)
	for range 100 {
		tr.stderr(bytes.Repeat([]byte("y"), 100<<10), false)
	}
	tail, trace := tr.end()
	if len(trace) > maxTrace || !strings.HasPrefix(trace, "panic: long\nyyy") {
		t.Errorf("a trace of %d bytes", len(trace))
	}
	if n := strings.Count(tail, "\n") + 1; n != stderrTail || len(tail) > stderrTail*(maxTailLine+1) {
		t.Errorf("a tail of %d lines and %d bytes", n, len(tail))
	}
}

// A trace that was outlived is one record, and no part of a later end.
func TestOutlivedTrace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := logs.NewBook(slog.DiscardHandler, slog.LevelInfo)
		tr := &transcript{log: b.Writer("a", 1)}
		for _, line := range []string{"panic: x", "", "goroutine 1 [running]:", `{"@level":"warn","@message":"in between"}`, "main.main()"} {
			tr.stderr([]byte(line), false)
		}
		synctest.Wait()
		if all := kept(t, b); len(all) != 1 || all[0].Message != "in between" {
			t.Errorf("records %+v", all)
		}
		time.Sleep(2 * traceIdle)
		all := kept(t, b)
		if len(all) != 2 || all[1].Message != "panic: x\n\ngoroutine 1 [running]:\nmain.main()" || all[1].Level != slog.LevelError {
			t.Errorf("records %+v", all)
		}
		tr.stderr([]byte("life goes on"), false)
		if _, trace := tr.end(); trace != "" {
			t.Errorf("trace %q", trace)
		}
	})
}

func TestLinesAreJoined(t *testing.T) {
	var got []string
	l := &lines{take: func(line []byte, truncated bool) { got = append(got, fmt.Sprint(len(line), truncated)) }}
	for range 3 {
		if _, err := io.WriteString(l, strings.Repeat("x", 1024)); err != nil {
			t.Fatal(err)
		}
	}
	for _, s := range []string{"y\r\n\nz", strings.Repeat("z", 2*maxLine), "\nend"} {
		if _, err := io.WriteString(l, s); err != nil {
			t.Fatal(err)
		}
	}
	l.end()
	if want := fmt.Sprintf("[3073 false 0 false %d true 3 false]", maxLine); fmt.Sprint(got) != want {
		t.Errorf("%v, want %s", got, want)
	}
}

func TestReadLine(t *testing.T) {
	in := bufio.NewReader(strings.NewReader("a\r\n\n" + strings.Repeat("b", maxLine) + "\n" + strings.Repeat("c", maxLine+1) + "\nlast"))
	var got []string
	for {
		line, truncated, err := readLine(in)
		got = append(got, fmt.Sprint(len(line), truncated))
		if err != nil {
			break
		}
	}
	if want := fmt.Sprintf("[1 false 0 false %d false %d true 4 false]", maxLine, maxLine); fmt.Sprint(got) != want {
		t.Errorf("%v, want %s", got, want)
	}
}

// Whatever a process writes, it becomes records that can be shown.
func FuzzStderr(f *testing.F) {
	for _, s := range []string{
		"plain\n", "panic: x\ngoroutine 1 [running]:\n", `{"@level":"error","@message":"m","@timestamp":"2026-01-02T03:04:05.000000Z","k":{"a":[1]}}` + "\n",
		`{"@level":1,"@message":{}}`, `{"@`, "\xff\xfe", "{\"@message\":\"\xff\"}", "fatal error: x\n\n",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		b := logs.NewBook(slog.DiscardHandler, slog.LevelInfo)
		tr := &transcript{log: b.Writer("a", 1)}
		in := bufio.NewReader(bytes.NewReader(text))
		for {
			line, truncated, err := readLine(in)
			tr.stderr(line, truncated)
			if err != nil {
				break
			}
		}
		tr.outlived()
		tail, trace := tr.end()
		if len(trace) > maxTrace || strings.Count(tail, "\n") >= stderrTail {
			t.Errorf("unbounded: %d bytes of trace, tail %q", len(trace), tail)
		}
		for _, r := range kept(t, b) {
			if r.Attributes != nil && !json.Valid(r.Attributes) {
				t.Errorf("attributes %q", r.Attributes)
			}
			if strings.ToValidUTF8(r.Message, "") != r.Message {
				t.Errorf("message %q", r.Message)
			}
		}
	})
}
