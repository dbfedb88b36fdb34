package host

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/testing/protocmp"

	controlv1 "github.com/cordon-host/cordon/api/control/v1"
	toolsv1 "github.com/cordon-host/cordon/api/tools/v1"
	"github.com/cordon-host/cordon/host/trust"
	"github.com/cordon-host/cordon/plugin"
)

// The test binary is the plugin: with HELPER it is one, whose only tool has that name.
func TestMain(m *testing.M) {
	name, isPlugin := os.LookupEnv("HELPER")
	if isPlugin {
		helper(name)
	}
	goleak.VerifyTestMain(m)
}

type helperConfig struct {
	Token string `json:"token,omitempty" jsonschema:"writeOnly=true"`
}

// helper is a plugin that misbehaves as files in its state directory, and calls of its tool, say.
func helper(name string) {
	has := func(file string) bool {
		_, err := os.Stat(file)
		return err == nil
	}
	plugin.Main(plugin.Plugin[helperConfig]{
		Name: "helper", Version: "1", Tools: []string{name},
		Apply: func(c *plugin.Context, config helperConfig) error {
			for has("wait") {
				time.Sleep(5 * time.Millisecond) // a file has no event that every system knows
			}
			if has("refuse") {
				return fmt.Errorf("cannot log in with %s", config.Token)
			}
			if has("panic") {
				go func() { panic("boom at boot") }()
				select {}
			}
			return c.Tool(plugin.Tool{
				Name: name, InputSchema: json.RawMessage(`{"type":"object","properties":{"do":{"type":"string"}}}`),
				Call: func(ctx context.Context, args json.RawMessage) (*toolsv1.CallReply, error) {
					var a struct{ Do string }
					if err := json.Unmarshal(args, &a); err != nil {
						return nil, err
					}
					switch a.Do {
					case "die":
						go func() { panic("boom in a goroutine") }()
						select {}
					case "panic":
						panic("boom in a handler")
					case "wait":
						<-ctx.Done()
						return nil, ctx.Err()
					case "hold":
						for has("hold") {
							time.Sleep(5 * time.Millisecond)
						}
					case "leak":
						slog.Info("my token is "+config.Token, "env", os.Getenv("TOKEN"))
						fmt.Fprintln(os.NewFile(2, "stderr"), "on stderr "+os.Getenv("TOKEN"))
					case "environ":
						return plugin.Text(strings.Join(os.Environ(), "\n")), nil
					}
					return plugin.Text("done by " + fmt.Sprint(os.Getpid())), nil
				},
			})
		},
	})
}

// world is a deployment of helpers.
type world struct {
	*testing.T
	dir    string
	opts   Options
	layout trust.Layout
	host   *Host
}

// row is a helper: its id, and whatever else its row says.
type row struct{ id, more string }

func newWorld(t *testing.T, rows ...row) *world {
	t.Helper()
	short := func() string { // t.TempDir is too long for a socket
		d, err := os.MkdirTemp("", "cordon")
		if err != nil {
			t.Fatal(err)
		}
		if d, err = filepath.EvalSymlinks(d); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.RemoveAll(d) })
		return d
	}
	w := &world{T: t, dir: short()}
	t.Setenv("XDG_RUNTIME_DIR", short())
	t.Setenv("XDG_CACHE_HOME", short())
	w.opts = Options{
		Compose: filepath.Join(w.dir, "compose.yml"), State: filepath.Join(short(), "state"), Version: "test", LogLevel: slog.LevelInfo,
	}
	for _, r := range rows {
		w.executable(r.id, "1")
	}
	w.compose(rows...)
	var err error
	if w.layout, err = trust.LayoutOf(w.opts.Compose, w.opts.State); err != nil {
		t.Fatal(err)
	}
	return w
}

// executable makes the executable of a row: the same program as all others, in bytes of its own.
func (w *world) executable(id, version string) {
	w.Helper()
	in, err := os.Open("/proc/self/exe")
	if err != nil {
		w.Fatal(err)
	}
	defer in.Close()
	path := filepath.Join(w.dir, id)
	out, err := os.OpenFile(path+".new", os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o755)
	if err != nil {
		w.Fatal(err)
	}
	_, err = io.Copy(out, in)
	_, err2 := io.WriteString(out, id+version)
	if err := errors.Join(err, err2, out.Close(), os.Rename(path+".new", path)); err != nil {
		w.Fatal(err)
	}
}

func (w *world) compose(rows ...row) {
	w.Helper()
	var b bytes.Buffer
	b.WriteString("cordon: 1\nsession: {store: \"sqlite:\"}\nplugins:\n")
	for _, r := range rows {
		env := "HELPER: poke-" + r.id
		more := r.more
		if extra, rest, ok := strings.Cut(more, "|"); ok { // variables, and the rest
			env, more = env+", "+extra, rest
		}
		fmt.Fprintf(&b, "  - {id: %s, use: ./%s, env: {%s}%s}\n", r.id, r.id, env, more)
	}
	if err := os.WriteFile(w.opts.Compose, b.Bytes(), 0o600); err != nil {
		w.Fatal(err)
	}
}

func (w *world) trust() {
	w.Helper()
	if _, err := Trust(w.Context(), w.opts); err != nil {
		w.Fatal(err)
	}
}

func (w *world) start() error {
	w.Helper()
	w.trust()
	var err error
	if w.host, err = Start(w.Context(), w.opts); err != nil {
		return err
	}
	w.Cleanup(func() {
		if err := w.host.Stop(context.Background()); err != nil {
			w.Error(err)
		}
	})
	return nil
}

func (w *world) mustStart() {
	w.Helper()
	if err := w.start(); err != nil {
		w.Fatal(err)
	}
}

// flag makes a file in the state directory of a row, where its plugin looks.
func (w *world) flag(id, name string) {
	w.Helper()
	dir := filepath.Join(w.layout.StateDir, "plugins", id)
	if err := errors.Join(os.MkdirAll(dir, 0o700), os.WriteFile(filepath.Join(dir, name), nil, 0o600)); err != nil {
		w.Fatal(err)
	}
}

func (w *world) unflag(id, name string) {
	w.Helper()
	if err := os.Remove(filepath.Join(w.layout.StateDir, "plugins", id, name)); err != nil {
		w.Fatal(err)
	}
}

func (w *world) status(id string) *controlv1.EntryStatus {
	w.Helper()
	r, err := w.host.Control().Status(w.Context(), &controlv1.StatusRequest{})
	if err != nil {
		w.Fatal(err)
	}
	for _, e := range r.GetEntries() {
		if e.GetId() == id {
			return e
		}
	}
	w.Fatalf("no entry %s", id)
	return nil
}

// until waits for a state of an entry that no event announces to a client.
func (w *world) until(id, what string, is func(*controlv1.EntryStatus) bool) *controlv1.EntryStatus {
	w.Helper()
	deadline := time.Now().Add(time.Minute)
	for {
		s := w.status(id)
		if is(s) {
			return s
		}
		if time.Now().After(deadline) {
			w.Fatalf("%s is not %s: %s", id, what, cmp.Diff(&controlv1.EntryStatus{}, s, protocmp.Transform()))
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func (w *world) active(id string, generation uint64) *controlv1.EntryStatus {
	w.Helper()
	return w.until(id, fmt.Sprintf("active with generation %d", generation), func(s *controlv1.EntryStatus) bool {
		return s.GetState() == "active" && s.GetGeneration() >= generation
	})
}

// poke calls the tool of an entry.
func (w *world) poke(id, do string) *controlv1.CallReply {
	w.Helper()
	r, err := w.host.Control().Call(w.Context(), &controlv1.CallRequest{
		Tool: "poke-" + id, Arguments: []byte(`{"do":"` + do + `"}`), Cwd: w.dir,
	})
	if err != nil {
		w.Fatal(err)
	}
	return r
}

// log is what is kept of an entry, and of all without a name.
func (w *world) log(id string) (out []*controlv1.LogLine) {
	w.Helper()
	stream, err := w.host.Control().Logs(w.Context(), &controlv1.LogsRequest{Entry: id, Tail: -1})
	for err == nil {
		var l *controlv1.LogLine
		if l, err = stream.Recv(); err == nil {
			out = append(out, l)
		}
	}
	if !errors.Is(err, io.EOF) {
		w.Fatal(err)
	}
	return out
}
