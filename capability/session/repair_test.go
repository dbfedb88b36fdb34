package session

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"
)

var update = flag.Bool("update", false, "write the golden files")

// readLog reads a log in the form of testdata/repair: one event a line, as type, turn and data. Lines that begin with # say what
// the log is about.
func readLog(t *testing.T, file string) []Event {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var drafts []Draft
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		part := strings.SplitN(line, " ", 3)
		turn, err := strconv.ParseInt(part[1], 10, 64)
		if err != nil {
			t.Fatalf("%s: %q: %v", file, line, err)
		}
		data, err := Canonical([]byte(part[2]))
		if err != nil {
			t.Fatalf("%s: %q: %v", file, line, err)
		}
		drafts = append(drafts, Draft{part[0], turn, data})
	}
	return logOf(drafts...)
}

func TestRepairGolden(t *testing.T) {
	files, err := filepath.Glob("testdata/repair/*.log")
	if err != nil || len(files) == 0 {
		t.Fatalf("no logs: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".log"), func(t *testing.T) {
			log := readLog(t, file)
			closers := Repair(header, log)
			var got bytes.Buffer
			for _, e := range closers {
				line, err := json.Marshal(e)
				if err != nil {
					t.Fatal(err)
				}
				fmt.Fprintf(&got, "%s\n", line)
			}
			golden := strings.TrimSuffix(file, ".log") + ".golden"
			if *update {
				if err := os.WriteFile(golden, got.Bytes(), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got.Bytes(), want) {
				t.Errorf("got:\n%swant:\n%s", &got, want)
			}
			repaired(t, log, closers)
		})
	}
}

// repaired checks what must hold of every repair: the chain goes on, the clock stands still, the rules agree, nothing is open,
// a repair is never repaired, and a repair that was itself cut off at any point is completed to the same facts.
func repaired(t *testing.T, log, closers []Event) {
	t.Helper()
	whole := append(log[:len(log):len(log)], closers...)
	if err := Verify(header, whole); err != nil {
		t.Errorf("repaired log: %v", err)
	}
	s := NewState(header)
	for _, e := range log {
		s.Apply(e)
	}
	for _, e := range closers {
		if !e.Time.Equal(log[len(log)-1].Time) {
			t.Errorf("closer %d has time %v of its own", e.Seq, e.Time)
		}
		if err := s.Check(Draft{e.Type, e.Turn, e.Data}); err != nil {
			t.Errorf("closer %d: %v", e.Seq, err)
		}
		s.Apply(e)
	}
	if open := s.OpenTurns(); len(open) != 0 {
		t.Errorf("turns %v are open after the repair", open)
	}
	if again := Repair(header, whole); len(again) != 0 {
		t.Errorf("the repaired log was repaired again: %v", again)
	}
	if again := Repair(header, log); !reflect.DeepEqual(again, closers) {
		t.Errorf("two repairs of one log differ")
	}
	for cut := range closers {
		if rest := Repair(header, whole[:len(log)+cut]); !reflect.DeepEqual(rest, closers[cut:]) {
			t.Errorf("a repair cut off after %d events is completed differently", cut)
		}
	}
}

// FuzzRepair makes a log that obeys the rules from the fuzzer's bytes, cuts it anywhere and repairs it.
func FuzzRepair(f *testing.F) {
	f.Add([]byte{0, 1, 2, 3, 4, 5, 6, 7})
	f.Add([]byte{0, 0, 1, 10, 19, 3, 12, 4, 6, 2, 5, 0, 1})
	f.Fuzz(func(t *testing.T, script []byte) {
		if len(script) > 40 {
			return
		}
		s := NewState(header)
		var log []Event
		for i, b := range script {
			turn, id := int64(b>>3&3)+1, b>>5
			var next Draft
			switch b & 7 {
			case 0:
				turn = s.NextTurn()
				next = d("turn/start", turn, fmt.Sprintf(`{"turn":%d}`, turn))
			case 1:
				next = d("tool/call", turn, fmt.Sprintf(`{"turn":%d,"callId":"c%d","name":"n","arguments":""}`, turn, id))
			case 2:
				next = d("tool/result", turn, fmt.Sprintf(`{"turn":%d,"callId":"c%d","isError":false,"content":[]}`, turn, id))
			case 3:
				next = d("approval/asked", turn, fmt.Sprintf(`{"id":"q%d","toolName":"n","callId":"c%d"}`, id, id))
			case 4:
				next = d("approval/decided", turn, fmt.Sprintf(`{"id":"q%d","outcome":"rejected"}`, id))
			case 5:
				next = d("turn/end", turn, fmt.Sprintf(`{"turn":%d,"reason":{"kind":"completed"}}`, turn))
			case 6:
				next = d("my/event", turn, `{}`)
			case 7:
				next = d("tool/result", turn, fmt.Sprintf(`{"turn":%d,"callId":"c%d","isError":true,"content":[],"error":{"name":"x","code":"TOOL_NOT_STARTED"}}`, turn, id))
			}
			if s.Check(next) != nil {
				continue
			}
			e := s.Seal(next, header.CreatedAt.Add(time.Duration(i)*time.Millisecond))
			s.Apply(e)
			log = append(log, e)
		}
		for cut := range log {
			repaired(t, log[:cut+1], Repair(header, log[:cut+1]))
		}
	})
}
