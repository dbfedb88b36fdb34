// Package test runs Cordon as its users do: the real binary, real plugin processes, the real disk. Each script in
// testdata/script is one scenario, readable as a shell session; see the commands below for what they use beyond
// testscript's own.
//
// As root every scenario runs a second time as an ordinary user. What a scenario needs and this machine lacks, a tool or a
// kernel feature, skips it, unless CORDON_TEST_REQUIRE names it.
package test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/cordon-host/cordon/host/process"
)

// The binaries under test are built once, before any scenario, into a directory that every user can read. A re-run as
// another user finds them, and a place to work in, through these variables.
const (
	binVariable  = "CORDON_TEST_BIN"
	workVariable = "CORDON_TEST_WORK"
)

// nobody is the ordinary user of the second run.
const nobody = 65534

// plugins are what the scenarios compose, by package.
var plugins = []string{
	"./plugins/sandbox-policy", "./plugins/sandbox-local", "./plugins/shell-sandbox", "./plugins/user-approval",
	"./plugins/tool-bash", "./test/plugins/meddler", "./test/plugins/thief", "./test/plugins/keeper",
}

func TestMain(m *testing.M) {
	testscript.Main(suite{m}, map[string]func(){
		"no-namespaces": noNamespaces,
		"raw-control":   rawControl,
	})
}

// suite builds what the scenarios run around the tests themselves.
type suite struct{ *testing.M }

func (m suite) Run() int {
	flag.Parse()
	if os.Getenv(binVariable) != "" || testing.Short() {
		return m.M.Run()
	}
	dir, err := os.MkdirTemp("", "cordon-test-bin-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	if err := errors.Join(os.Chmod(dir, 0o755), build(dir), os.Setenv(binVariable, dir)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.M.Run()
}

func build(dir string) error {
	cmd := exec.Command("go", append([]string{"build", "-o", dir + "/", "./cmd/cordon"}, plugins...)...)
	cmd.Dir = ".."
	// As the host builds plugins: no cgo.
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", cmd, err, out)
	}
	return nil
}

func TestScenarios(t *testing.T) {
	if testing.Short() {
		t.Skip("scenarios start real processes")
	}
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/script",
		WorkdirRoot:         workRoot(t, os.Geteuid()),
		Setup:               setup,
		Condition:           condition,
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"await":      await,
			"approvals":  approvals,
			"approver":   approver,
			"code":       code,
			"entry-pid":  entryPID,
			"no-process": noProcess,
			"no-socket":  noSocket,
			"signal":     sendSignal,
		},
	})
}

// workRoot is a directory of a user for the scenarios. It is not below /tmp or /var/tmp, which a confined command has of its own:
// there a write beside the workspace would not fail but vanish.
func workRoot(t *testing.T, uid int) string {
	t.Helper()
	if dir := os.Getenv(workVariable); dir != "" {
		return dir
	}
	base := "/var/cache"
	if os.Geteuid() != 0 {
		var err error
		if base, err = os.UserCacheDir(); err != nil {
			t.Fatal(err)
		}
		if err := os.MkdirAll(base, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	dir, err := os.MkdirTemp(base, "cordon-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chown(dir, uid, -1); err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestScenariosAsNobody runs the scenarios again as an ordinary user: root passes many a check that others fail.
func TestScenariosAsNobody(t *testing.T) {
	if testing.Short() {
		t.Skip("scenarios start real processes")
	}
	if os.Geteuid() != 0 {
		t.Skip("only root can become somebody else; the other test is this one")
	}
	tmp := workRoot(t, nobody)
	// Neither the test binary nor the repository need be readable for others.
	self := filepath.Join(os.Getenv(binVariable), "scenarios.test")
	if err := copyFile(self, "/proc/self/exe", 0o755); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(tmp, "test")
	if err := os.CopyFS(filepath.Join(dir, "testdata"), os.DirFS("testdata")); err != nil {
		t.Fatal(err)
	}
	args := []string{"-test.run=^TestScenarios$", "-test.timeout=" + remaining(t).String(), fmt.Sprintf("-test.parallel=%d", parallel())}
	if testing.Verbose() {
		args = append(args, "-test.v")
	}
	if f := flag.Lookup("test.run").Value.String(); strings.Contains(f, "/") {
		_, only, _ := strings.Cut(f, "/")
		args[0] += "/" + only
	}
	cmd := exec.Command(self, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "HOME="+tmp, "TMPDIR="+tmp, workVariable+"="+tmp)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Error(err)
	}
}

func parallel() int {
	n, _ := strconv.Atoi(flag.Lookup("test.parallel").Value.String())
	return max(n, 1)
}

// remaining is how long the other run may take, so that it says what hung before this one is killed.
func remaining(t *testing.T) time.Duration {
	deadline, ok := t.Deadline()
	if !ok {
		return 0
	}
	return max(time.Until(deadline)-20*time.Second, time.Second).Truncate(time.Second)
}

func copyFile(to, from string, mode fs.FileMode) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, mode)
	if err != nil {
		return err
	}
	if _, err := io.Copy(out, in); err != nil {
		return errors.Join(err, out.Close())
	}
	return out.Close()
}

// composition is the default deployment with the plugins built beforehand.
const composition = `cordon: 1
plugins:
  - id: policy
    use: %[1]s/sandbox-policy
  - id: sandbox
    use: %[1]s/sandbox-local
    unconfined: true
  - id: approval
    use: %[1]s/user-approval
  - id: shell
    use: %[1]s/shell-sandbox
    unconfined: true
  - id: bash
    use: %[1]s/tool-bash
`

// setup gives each scenario a home, a place for state and sockets, a deployment and a workspace of its own:
//
//	$C     the compose file of the default deployment, deploy/compose.yml; $BIN has the plugins it names
//	$WS    the workspace, ws, where the script begins
//	$REPO  the root of this repository
func setup(env *testscript.Env) error {
	bin := os.Getenv(binVariable)
	repo, err := filepath.Abs("..")
	if err != nil {
		return err
	}
	for _, dir := range []string{"home", "state", "deploy", "ws"} {
		if err := os.Mkdir(filepath.Join(env.WorkDir, dir), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	compose := filepath.Join(env.WorkDir, "deploy", "compose.yml")
	if err := os.WriteFile(compose, fmt.Appendf(nil, composition, bin), 0o600); err != nil {
		return err
	}
	// Not below $WORK: the path of a socket has to be short.
	run, err := os.MkdirTemp("/tmp", "cordon-run-")
	if err != nil {
		return err
	}
	env.Defer(func() { os.RemoveAll(run) })
	env.Setenv("HOME", filepath.Join(env.WorkDir, "home"))
	env.Setenv("XDG_STATE_HOME", filepath.Join(env.WorkDir, "state"))
	env.Setenv("XDG_RUNTIME_DIR", run)
	env.Setenv("PATH", bin+string(os.PathListSeparator)+env.Getenv("PATH"))
	env.Setenv("LC_ALL", "C.UTF-8")
	env.Setenv("BIN", bin)
	// $HOME is the scenario's; what the Go toolchain has by now is the tests'.
	for _, name := range []string{"GOCACHE", "GOMODCACHE"} {
		if dir, err := exec.Command("go", "env", name).Output(); err == nil {
			env.Setenv(name+"_OF_TEST", strings.TrimSpace(string(dir)))
		}
	}
	env.Setenv("C", compose)
	env.Setenv("WS", filepath.Join(env.WorkDir, "ws"))
	env.Setenv("REPO", repo)
	env.Cd = filepath.Join(env.WorkDir, "ws")
	return nil
}

// condition knows, beyond testscript's own:
//
//	[root]   this is the superuser
//	[bwrap]  bubblewrap works here; required when CORDON_TEST_REQUIRE has bwrap
//	[cgroup] this process may limit what it starts; required when CORDON_TEST_REQUIRE has cgroup
//	[go]     the repository can be built from here
func condition(name string) (bool, error) {
	switch name {
	case "root":
		return os.Geteuid() == 0, nil
	case "bwrap":
		return require("bwrap", exec.Command("bwrap", "--unshare-all", "--ro-bind", "/", "/", "true").Run())
	case "cgroup":
		return require("cgroup", process.Limitable(process.Limits{Memory: 1, Pids: 1}))
	case "go":
		if _, err := os.Stat("../go.mod"); err != nil {
			return false, nil
		}
		_, err := exec.LookPath("go")
		return require("go", err)
	}
	return false, fmt.Errorf("unknown condition %q", name)
}

func require(what string, err error) (bool, error) {
	if err != nil && slices.Contains(strings.Split(os.Getenv("CORDON_TEST_REQUIRE"), ","), what) {
		return false, fmt.Errorf("CORDON_TEST_REQUIRE has %s: %w", what, err)
	}
	return err == nil, nil
}

// patience is how long a scenario waits for something that has to happen. It is never what is measured.
const patience = time.Minute

// until waits for done; what names it in the failure.
func until(ts *testscript.TestScript, what func() string, done func() bool) {
	deadline := time.Now().Add(patience)
	for !done() {
		if time.Now().After(deadline) {
			ts.Fatalf("after %v: %s", patience, what())
		}
		time.Sleep(20 * time.Millisecond) // files and processes of others announce nothing
	}
}

// await waits until a file exists that a pattern matches.
//
//	await PATTERN
func await(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: await PATTERN")
	}
	until(ts, func() string { return args[0] + " does not exist" }, func() bool {
		found, err := filepath.Glob(ts.MkAbs(args[0]))
		ts.Check(err)
		return len(found) > 0
	})
}

// code reads the running host's one-use login code, where only its owner finds it, into $CODE.
func code(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 0 {
		ts.Fatalf("usage: code")
	}
	found, err := filepath.Glob(ts.Getenv("XDG_STATE_HOME") + "/cordon/*/login-code")
	ts.Check(err)
	if len(found) != 1 {
		ts.Fatalf("login codes: %v", found)
	}
	text, err := os.ReadFile(found[0])
	ts.Check(err)
	ts.Setenv("CODE", strings.TrimSpace(string(text)))
}

// cordon runs a command and returns its stdout.
func cordon(ts *testscript.TestScript, args ...string) []byte {
	cmd := command(ts, args...)
	out, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			ts.Logf("%s", exit.Stderr)
		}
		ts.Fatalf("%s: %v", cmd, err)
	}
	return out
}

func command(ts *testscript.TestScript, args ...string) *exec.Cmd {
	cmd := exec.Command(filepath.Join(ts.Getenv("BIN"), "cordon"), args...)
	cmd.Dir = ts.MkAbs(".")
	for _, name := range []string{"HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR", "PATH"} {
		cmd.Env = append(cmd.Env, name+"="+ts.Getenv(name))
	}
	return cmd
}

// entryPID puts the process id of an entry of the running host into a variable.
//
//	entry-pid ENTRY VARIABLE
func entryPID(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: entry-pid ENTRY VARIABLE")
	}
	var status struct {
		PID     int64
		Entries []struct {
			ID  string
			PID int64
		}
	}
	ts.Check(json.Unmarshal(cordon(ts, "status", "--json", "-f", ts.Getenv("C")), &status))
	if args[0] == "host" {
		ts.Setenv(args[1], strconv.FormatInt(status.PID, 10))
		return
	}
	for _, e := range status.Entries {
		if e.ID == args[0] && e.PID > 0 {
			ts.Setenv(args[1], strconv.FormatInt(e.PID, 10))
			return
		}
	}
	ts.Fatalf("no process of entry %s in %+v", args[0], status)
}

// sendSignal sends a signal to a process and, for KILL, waits until it is gone.
//
//	signal NAME PID
func sendSignal(ts *testscript.TestScript, neg bool, args []string) {
	signals := map[string]syscall.Signal{"KILL": syscall.SIGKILL, "TERM": syscall.SIGTERM, "INT": syscall.SIGINT}
	if neg || len(args) != 2 || signals[args[0]] == 0 {
		ts.Fatalf("usage: signal KILL|TERM|INT PID")
	}
	pid, err := strconv.Atoi(args[1])
	ts.Check(err)
	ts.Check(syscall.Kill(pid, signals[args[0]]))
}

// noProcess waits until no process is left that this scenario started: one that runs, names, works in or was told of something
// below $WORK.
func noProcess(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 0 {
		ts.Fatalf("usage: no-process")
	}
	work := ts.Getenv("WORK")
	var left []string
	until(ts, func() string { return "processes left:\n" + strings.Join(left, "\n") }, func() bool {
		left = processesOf(work)
		return len(left) == 0
	})
}

func processesOf(work string) []string {
	var found []string
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		if filepath.Base(dir) == strconv.Itoa(os.Getpid()) {
			continue
		}
		cmdline, err := os.ReadFile(filepath.Join(dir, "cmdline"))
		if err != nil {
			continue // it has ended
		}
		about := []string{strings.ReplaceAll(string(cmdline), "\x00", " ")}
		for _, link := range []string{"exe", "cwd"} {
			if to, err := os.Readlink(filepath.Join(dir, link)); err == nil {
				about = append(about, to)
			}
		}
		env, _ := os.ReadFile(filepath.Join(dir, "environ")) // of other users it cannot be read
		if strings.Contains(strings.Join(about, "\n"), work) || bytes.Contains(env, []byte(work)) {
			stat, _ := os.ReadFile(filepath.Join(dir, "stat"))
			found = append(found, filepath.Base(dir)+": "+strings.Join(about, " | ")+" "+string(stat))
		}
	}
	return found
}

// noSocket checks that no socket is left where the hosts of this scenario have theirs.
func noSocket(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 0 {
		ts.Fatalf("usage: no-socket")
	}
	for _, dir := range []string{ts.Getenv("WORK"), ts.Getenv("XDG_RUNTIME_DIR")} {
		ts.Check(filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.Type() == fs.ModeSocket {
				err = fmt.Errorf("%s is left", path)
			}
			return err
		}))
	}
}

// approvals checks the questions of a session's log: their outcomes in order, each decided after it was asked, both inside one
// open turn, and each id once.
//
//	approvals SESSION [OUTCOME …]
func approvals(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 1 {
		ts.Fatalf("usage: approvals SESSION [OUTCOME ...]")
	}
	log := cordon(ts, "log", args[0], "--json", "-f", ts.Getenv("C"))
	type event struct {
		Type string
		Turn int64
		Data struct{ ID, Outcome string }
	}
	open := map[int64]bool{}
	asked := map[string]int64{}
	got := []string{}
	for line := range bytes.Lines(log) {
		var e event
		ts.Check(json.Unmarshal(line, &e))
		switch e.Type {
		case "turn/start":
			open[e.Turn] = true
		case "turn/end":
			delete(open, e.Turn)
		case "approval/asked":
			if _, again := asked[e.Data.ID]; again || !open[e.Turn] {
				ts.Fatalf("asked outside a turn or twice:\n%s", log)
			}
			asked[e.Data.ID] = e.Turn
		case "approval/decided":
			if turn, ok := asked[e.Data.ID]; !ok || turn != e.Turn || !open[e.Turn] {
				ts.Fatalf("decided without a question in that open turn:\n%s", log)
			}
			got = append(got, e.Data.Outcome)
		}
	}
	if !slices.Equal(got, args[1:]) || len(got) != len(asked) || len(open) > 0 {
		ts.Fatalf("%d questions, outcomes %q, open turns %v; want %q\n%s", len(asked), got, open, args[1:], log)
	}
}

// approver logs in with $CODE and sits at the inbox in the background. It answers each question with the words, in which N
// stands for its number. It leaves when the scenario ends.
//
//	approver WORD …
func approver(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) == 0 {
		ts.Fatalf("usage: approver WORD ...")
	}
	cmd := command(ts, "approve", "-f", ts.Getenv("C"), "--code", ts.Getenv("CODE"))
	in, err := cmd.StdinPipe()
	ts.Check(err)
	out, err := cmd.StdoutPipe()
	ts.Check(err)
	errors, err := cmd.StderrPipe()
	ts.Check(err)
	ts.Check(cmd.Start())
	var readers sync.WaitGroup
	watching := make(chan bool, 1)
	var said syncedLines
	readers.Go(func() {
		for s := bufio.NewScanner(errors); s.Scan(); {
			said.add(s.Text())
			if strings.Contains(s.Text(), "watching") {
				watching <- true
			}
		}
		close(watching)
	})
	readers.Go(func() {
		for s := bufio.NewScanner(out); s.Scan(); {
			said.add(s.Text())
			number, ok := strings.CutPrefix(s.Text(), "  answer: allow ")
			if !ok {
				continue
			}
			number = strings.TrimRight(strings.Fields(number)[0], ",")
			// A host that has stopped meanwhile takes no answer.
			_, _ = io.WriteString(in, strings.ReplaceAll(strings.Join(args, " "), "N", number)+"\n")
		}
	})
	ts.Defer(func() {
		in.Close()
		readers.Wait()
		_ = cmd.Wait() // it ends with its input
		ts.Logf("approver saw:\n%s", said.String())
	})
	if !<-watching {
		ts.Fatalf("approver ended: %s", said.String())
	}
}

type syncedLines struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *syncedLines) add(line string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.b.WriteString(line + "\n")
}

func (l *syncedLines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}
