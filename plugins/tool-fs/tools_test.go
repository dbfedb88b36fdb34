package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	iofs "io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	approvalv1 "github.com/cordon-host/cordon/api/approval/v1"
	fsv1 "github.com/cordon-host/cordon/api/fs/v1"
	policyv1 "github.com/cordon-host/cordon/api/policy/v1"
	toolsv1 "github.com/cordon-host/cordon/api/tools/v1"
	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/capability/fs"
	"github.com/cordon-host/cordon/capability/sandbox"
	"github.com/cordon-host/cordon/plugin"
	"github.com/cordon-host/cordon/plugin/fskit"
	"github.com/cordon-host/cordon/plugin/plugintest"
)

// world is everything the tools call, with the order in which they did. Its file system works on real disks, unfenced unless
// fail says otherwise: what a provider allows is not this plugin's test.
type world struct {
	fsv1.UnimplementedFsServer
	files   fskit.FS
	fail    func(proto.Message) error
	resolve func() (*policyv1.ResolveReply, error)
	answer  func(context.Context, *approvalv1.ApprovalRequest) (*approvalv1.ApprovalReply, error)

	mu    sync.Mutex
	steps []proto.Message
}

func (w *world) note(m proto.Message) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.steps = append(w.steps, proto.Clone(m))
	if w.fail != nil {
		return w.fail(m)
	}
	return nil
}

// did are the names of the steps, and the last request of type M.
func did[M proto.Message](w *world) (names string, last M) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var all []string
	for _, m := range w.steps {
		all = append(all, strings.ToLower(strings.TrimSuffix(string(m.ProtoReflect().Descriptor().Name()), "Request")))
		if m, ok := m.(M); ok {
			last = m
		}
	}
	return strings.Join(all, " "), last
}

func steps(w *world) string { names, _ := did[*fsv1.ReadRequest](w); return names }

var open = fskit.Policy{Mode: sandbox.DangerFullAccess, Root: "/"}

func (w *world) Read(ctx context.Context, r *fsv1.ReadRequest) (*fsv1.ReadReply, error) {
	if err := w.note(r); err != nil {
		return nil, err
	}
	t, err := w.files.Read(ctx, open, r.GetPath(), fskit.Window{Offset: r.GetOffset(), Limit: r.GetLimit(), MaxBytes: r.GetMaxBytes(), MaxLine: r.GetMaxLine()})
	out := &fsv1.ReadReply{Path: t.Path, Version: t.Version, TotalLines: t.Total, Capped: t.Capped}
	for _, l := range t.Lines {
		out.Lines = append(out.Lines, &fsv1.Line{Number: l.Number, Text: l.Text, Cut: l.Cut})
	}
	return out, err
}

func (w *world) Resolve(ctx context.Context, r *fsv1.ResolveRequest) (*fsv1.ResolveReply, error) {
	if err := w.note(r); err != nil {
		return nil, err
	}
	path, exists, err := w.files.Resolve(ctx, open, r.GetPath())
	return &fsv1.ResolveReply{Path: path, Exists: exists}, err
}

func (w *world) Write(ctx context.Context, r *fsv1.WriteRequest) (*fsv1.WriteReply, error) {
	if err := w.note(r); err != nil {
		return nil, err
	}
	out, err := w.files.Write(ctx, open, r.GetPath(), r.GetContent(), fskit.Precondition{LeadsTo: r.GetPrecondition().GetLeadsTo()})
	return &fsv1.WriteReply{Path: out.Path, Created: out.Created, Version: out.Version, Mode: "workspace-write"}, err
}

func (w *world) Edit(ctx context.Context, r *fsv1.EditRequest) (*fsv1.EditReply, error) {
	if err := w.note(r); err != nil {
		return nil, err
	}
	out, err := w.files.Edit(ctx, open, r.GetPath(), r.GetOldString(), r.GetNewString(), r.GetReplaceAll(), fskit.Precondition{LeadsTo: r.GetPrecondition().GetLeadsTo()})
	return &fsv1.EditReply{Path: out.Path, Replacements: out.Replacements, Version: out.Version, Mode: "workspace-write"}, err
}

type policyFake struct {
	policyv1.UnimplementedPolicyServer
	*world
}

func (p policyFake) Resolve(_ context.Context, r *policyv1.ResolveRequest) (*policyv1.ResolveReply, error) {
	if err := p.note(r); err != nil {
		return nil, err
	}
	return p.resolve()
}

type approvalFake struct {
	approvalv1.UnimplementedApprovalServer
	*world
}

func (a approvalFake) Request(ctx context.Context, r *approvalv1.ApprovalRequest) (*approvalv1.ApprovalReply, error) {
	if err := a.note(r); err != nil {
		return nil, err
	}
	return a.answer(ctx, r)
}

func newWorld(mode, root string) *world {
	return &world{
		resolve: func() (*policyv1.ResolveReply, error) {
			return &policyv1.ResolveReply{Mode: mode, WorkspaceRoot: root}, nil
		},
		answer: func(context.Context, *approvalv1.ApprovalRequest) (*approvalv1.ApprovalReply, error) {
			return &approvalv1.ApprovalReply{Outcome: "allowed-once", Grant: "g1"}, nil
		},
	}
}

func (w *world) options(confines, policy, approval bool) []plugintest.Option {
	facts := fs.Facts{Confines: confines}
	if confines {
		facts.SandboxMode = sandbox.ReadOnly
	}
	opts := []plugintest.Option{plugintest.Fake("fs", &fsv1.Fs_ServiceDesc, w), plugintest.FactsOf("fs", facts)}
	if policy {
		opts = append(opts, plugintest.Fake("policy", &policyv1.Policy_ServiceDesc, policyFake{world: w}))
	}
	if approval {
		opts = append(opts, plugintest.Fake("approval", &approvalv1.Approval_ServiceDesc, approvalFake{world: w}))
	}
	return opts
}

func start(t *testing.T, w *world, opts ...plugintest.Option) *plugintest.Plugin {
	t.Helper()
	return plugintest.Start(t, Plugin, append(w.options(true, true, true), opts...)...)
}

var inSession = plugin.Call{Session: "s", Agent: "mcp/x/s", Turn: 1}

// call sends the arguments past the schema, as they are.
func call(t *testing.T, p *plugintest.Plugin, c plugin.Call, tool, arguments string) *toolsv1.CallReply {
	t.Helper()
	r, err := toolsv1.NewToolsClient(p.Conn()).Call(p.Stamp(t.Context(), c), &toolsv1.CallRequest{Name: tool, Arguments: []byte(arguments)})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// arguments are JSON from pairs.
func arguments(pairs ...any) string {
	m := map[string]any{}
	for i := 0; i < len(pairs); i += 2 {
		m[pairs[i].(string)] = pairs[i+1]
	}
	raw, err := json.Marshal(m)
	if err != nil {
		panic(err)
	}
	return string(raw)
}

func shown(r *toolsv1.CallReply) string {
	var all []string
	for _, c := range r.GetContent() {
		all = append(all, c.GetText())
	}
	return strings.Join(all, "|")
}

func put(t *testing.T, dir, name, content string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	must(t, os.WriteFile(path, []byte(content), 0o644))
	return path
}

func content(t testing.TB, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if errors.Is(err, iofs.ErrNotExist) {
		return "(none)"
	}
	must(t, err)
	return string(data)
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// realDir is a temporary directory without links in its path.
func realDir(t *testing.T) string { return sandbox.CanonicalPath(t.TempDir()) }

func TestLoad(t *testing.T) {
	// fails load when a confining filesystem has no shared sandbox-policy resolver
	_, err := plugintest.Load(t, Plugin, newWorld("", "").options(true, false, true)...)
	if want := "tool-fs: the mounted filesystem confines but the policy capability is missing"; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("loads with %v, want %q", err, want)
	}
	plugintest.Start(t, Plugin, newWorld("", "").options(false, false, false)...)
	// rejects a non-positive or fractional cap at load
	for _, name := range []string{"readLimit", "readMaxLineLength", "readMaxBytes"} {
		for _, value := range []string{"0", "-1", "1.5", `"x"`} {
			opts := append(newWorld("", "").options(true, true, true), plugintest.Config(`{"`+name+`":`+value+`}`))
			if _, err := plugintest.Load(t, Plugin, opts...); err == nil || !strings.Contains(err.Error(), name) {
				t.Errorf("%s %s loads with %v", name, value, err)
			}
		}
	}
}

func TestRegistration(t *testing.T) { // registers read, write, and edit, and a prompt section for each
	p := start(t, newWorld("read-only", "/"))
	var names []string
	for _, tool := range p.Tools() {
		names = append(names, tool.GetName())
	}
	if !slices.Equal(names, []string{"read", "write", "edit"}) {
		t.Errorf("tools %v", names)
	}
	for i, name := range []string{"tool:read", "tool:write", "tool:edit"} {
		c := p.Manifest().GetContexts()[i]
		text, err := p.Context(p.Stamp(t.Context(), inSession), name)
		if err != nil || c.GetName() != name || c.GetOrder() != int32(100+i) || !strings.HasPrefix(text, "Use the "+name[5:]+" tool ") {
			t.Errorf("%v: %q, %v", c, text, err)
		}
	}
	if got, _ := p.Context(p.Stamp(t.Context(), inSession), "tool:read"); got != "Use the read tool — not shell commands like cat — to inspect text files. Results include line numbers. Use offset and limit to continue reading large files." {
		t.Errorf("%q", got)
	}
}

func TestSchema(t *testing.T) {
	own := map[string][]string{"read": {"file_path", "limit", "offset"}, "write": {"content", "file_path"}, "edit": {"file_path", "new_string", "old_string", "replace_all"}}
	required := map[string][]string{"read": {"file_path"}, "write": {"file_path", "content"}, "edit": {"file_path", "old_string", "new_string"}}
	for _, confines := range []bool{true, false} {
		p := plugintest.Start(t, Plugin, append(newWorld("read-only", "/").options(confines, true, true), plugintest.Config(`{"readLimit":7}`))...)
		for _, tool := range p.Tools() {
			var schema struct {
				Properties map[string]struct {
					Type        string
					Description string
					Enum        []string
				}
				Required             []string
				AdditionalProperties *bool
			}
			must(t, json.Unmarshal(tool.GetInputSchema(), &schema))
			want := slices.Clone(own[tool.GetName()])
			if confines && tool.GetName() != "read" { // advertises the closed target vocabulary on write and edit under a confining backend
				want = append(want, "justification", "sandbox_permissions")
				if got := schema.Properties["sandbox_permissions"].Enum; !cmp.Equal(got, []string{"workspace-write", "danger-full-access"}) {
					t.Errorf("%s: enum %v", tool.GetName(), got)
				}
			}
			slices.Sort(want)
			var got []string
			for name, p := range schema.Properties {
				got = append(got, name)
				if p.Type == "" || p.Description == "" {
					t.Errorf("%s: %s: %+v", tool.GetName(), name, p)
				}
			}
			slices.Sort(got)
			if !slices.Equal(got, want) || !slices.Equal(schema.Required, required[tool.GetName()]) || schema.AdditionalProperties == nil || *schema.AdditionalProperties {
				t.Errorf("%s, confines %v: %v, required %v", tool.GetName(), confines, got, schema.Required)
			}
			if tool.GetName() == "read" && !strings.Contains(schema.Properties["limit"].Description, "7") {
				t.Errorf("the limit is not named: %s", schema.Properties["limit"].Description)
			}
		}
	}
}

func TestArguments(t *testing.T) {
	const pair = `"sandbox_permissions":"workspace-write","justification":"because"`
	for _, c := range []struct{ tool, arguments, want string }{
		{"read", `{}`, "file_path must be a non-empty string"},
		{"read", `{"file_path":" "}`, "file_path must be a non-empty string"},
		{"read", `{"file_path":3}`, "invalid file_path: expected a string, got a number"},
		{"read", `{"file_path":"a","offset":0}`, "offset must be a positive integer"},
		{"read", `{"file_path":"a","offset":-1}`, "offset must be a positive integer"},
		{"read", `{"file_path":"a","offset":1.5}`, "offset must be a positive integer"},
		{"read", `{"file_path":"a","offset":"1"}`, "offset must be a positive integer"},
		{"read", `{"file_path":"a","offset":null}`, "offset must be a positive integer"},
		{"read", `{"file_path":"a","offset":1e99}`, "offset must be a positive integer"},
		{"read", `{"file_path":"a","limit":0}`, "limit must be a positive integer"},
		{"read", `{"file_path":"a","limit":1.5}`, "limit must be a positive integer"},
		{"read", `{"file_path":"a","limit":2001}`, "limit must be less than or equal to 2000"},
		{"read", `{"file_path":"a",` + pair + `}`, `invalid arguments: json: unknown field "sandbox_permissions"`},
		{"read", `{"file_path":"a","grant":"g"}`, `invalid arguments: json: unknown field "grant"`},
		{"write", `{"content":"x"}`, "file_path must be a non-empty string"},
		{"write", `{"file_path":"","content":"x"}`, "file_path must be a non-empty string"},
		{"write", `{"file_path":"a"}`, "content must be a string"},
		{"write", `{"file_path":"a","content":"x","grant":"g"}`, `invalid arguments: json: unknown field "grant"`},
		{"write", `{"file_path":"a","content":"x","sandbox_permissions":"workspace-write"}`, "invalid escalation: sandbox_permissions requires a justification"},
		{"write", `{"file_path":"a","content":"x","justification":"because"}`, "invalid escalation: justification is only valid together with sandbox_permissions"},
		{"write", `{"file_path":"a","content":"x","sandbox_permissions":"workspace-write","justification":" "}`, "invalid justification: expected a non-empty sentence"},
		{"write", `{"file_path":"a","content":"x","sandbox_permissions":"yolo","justification":"because"}`, `invalid sandbox_permissions: sandbox mode must be one of "read-only", "workspace-write" or "danger-full-access", got "yolo"`},
		{"edit", `{"file_path":" ","old_string":"a","new_string":"b"}`, "file_path must be a non-empty string"},
		{"edit", `{"file_path":"a","old_string":"","new_string":"b"}`, "old_string must be a non-empty string"},
		{"edit", `{"file_path":"a","new_string":"b"}`, "old_string must be a non-empty string"},
		{"edit", `{"file_path":"a","old_string":"b"}`, "new_string must be a string"},
		{"edit", `{"file_path":"a","old_string":"b","new_string":"b"}`, "old_string and new_string must differ"},
		{"edit", `{"file_path":"a","old_string":"a","new_string":"b","replace_all":"yes"}`, "invalid replace_all: expected a bool, got a string"},
		{"edit", `{"file_path":"a","old_string":"a","new_string":"b","justification":"x"}`, "invalid escalation: justification is only valid together with sandbox_permissions"},
		{"edit", `[]`, "invalid arguments: json: cannot unmarshal array into Go value"},
		{"edit", `{`, "invalid arguments: unexpected EOF"},
		{"edit", `{"file_path":"a","old_string":"a","new_string":"b"} {}`, "invalid arguments: expected one JSON object"},
	} {
		w := newWorld("read-only", "/")
		r := call(t, start(t, w), inSession, c.tool, c.arguments)
		if !r.GetIsError() || r.GetErrorCode() != "INVALID_ARGUMENTS" || !strings.HasPrefix(shown(r), c.want) {
			t.Errorf("%s %s: %q (%s), want %q", c.tool, c.arguments, shown(r), r.GetErrorCode(), c.want)
		}
		if s := steps(w); s != "" {
			t.Errorf("%s %s: did %s", c.tool, c.arguments, s)
		}
	}
}

func TestRead(t *testing.T) {
	root := realDir(t)
	put(t, root, "three.txt", "a\nb\nc\n")
	put(t, root, "crlf.txt", "a\r\nb\r\n")
	put(t, root, "open-end.txt", "a\nb")
	put(t, root, "empty.txt", "")
	put(t, root, "long.txt", strings.Repeat("é", 2001)+"\nx\n")
	put(t, root, "many.txt", strings.Repeat("0123456789\n", 10_000))
	put(t, root, "binary", "a\x00b")
	put(t, root, "latin1.txt", "caf\xe9\n")
	must(t, os.Mkdir(root+"/dir", 0o755))
	for _, c := range []struct{ name, arguments, want, code string }{
		{"formats line-numbered content with a footer", `{"file_path":"three.txt"}`, "1: a\n2: b\n3: c\n\n(End of file - total 3 lines)", ""},
		{"a window in the middle", `{"file_path":"three.txt","offset":2,"limit":1}`, "2: b\n\n(Showing lines 2-2 of 3. Use offset=3 to continue.)", ""},
		{"whole numbers may have a fraction of nothing", `{"file_path":"three.txt","offset":3.0}`, "3: c\n\n(End of file - total 3 lines)", ""},
		{"strips CRLF", `{"file_path":"crlf.txt"}`, "1: a\n2: b\n\n(End of file - total 2 lines)", ""},
		{"flushes a final line with no trailing newline", `{"file_path":"open-end.txt"}`, "1: a\n2: b\n\n(End of file - total 2 lines)", ""},
		{"an empty file", `{"file_path":"empty.txt"}`, "(End of file - total 0 lines)", ""},
		{"truncates an over-long line", `{"file_path":"long.txt"}`, "1: " + strings.Repeat("é", 2000) + "... (line truncated to 2000 chars)\n2: x\n\n(End of file - total 2 lines)", ""},
		{"offset past the end", `{"file_path":"three.txt","offset":4}`, `offset 4 is out of range for "$W/three.txt" (3 lines)`, fs.NotFound},
		{"propagates FS_NOT_FOUND for an absent file", `{"file_path":"none"}`, `cannot read "$W/none": not found`, fs.NotFound},
		{"rejects a non-regular target", `{"file_path":"dir"}`, `cannot read "$W/dir": not a regular file`, fs.NotRegularFile},
		{"reports a binary file as an error", `{"file_path":"binary"}`, `cannot read "$W/binary": binary file`, fs.NotText},
		{"text that is not UTF-8", `{"file_path":"latin1.txt"}`, `cannot read "$W/latin1.txt": invalid UTF-8 text`, fs.NotText},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := call(t, start(t, newWorld("read-only", root)), inSession, "read", c.arguments)
			want := strings.ReplaceAll(c.want, "$W", root)
			if c.code == "" {
				var in struct {
					Path string `json:"file_path"`
				}
				must(t, json.Unmarshal([]byte(c.arguments), &in))
				want = "<path>" + root + "/" + in.Path + "</path>\n<type>file</type>\n<content>\n" + want + "\n</content>"
			}
			if shown(r) != want || r.GetErrorCode() != c.code || r.GetIsError() != (c.code != "") {
				t.Errorf("%q (%s)\nwant %q (%s)", shown(r), r.GetErrorCode(), want, c.code)
			}
		})
	}
	r := call(t, start(t, newWorld("read-only", root)), inSession, "read", `{"file_path":"many.txt","limit":2000}`)
	if got, want := shown(r), "(Showing lines 1-2000 of 10000. Use offset=2001 to continue.)\n</content>"; !strings.HasSuffix(got, want) {
		t.Errorf("ends in %q", got[len(got)-100:])
	}
	// Caps are the row's config.
	p := start(t, newWorld("read-only", root), plugintest.Config(`{"readLimit":3,"readMaxLineLength":4,"readMaxBytes":11}`))
	for arguments, want := range map[string]string{
		`{"file_path":"many.txt"}`:           "1: 0123... (line truncated to 4 chars)\n2: 0123... (line truncated to 4 chars)\n\n(Output capped. Showing lines 1-2. Use offset=3 to continue.)",
		`{"file_path":"three.txt"}`:          "1: a\n2: b\n3: c\n\n(End of file - total 3 lines)",
		`{"file_path":"long.txt","limit":1}`: "1: éééé... (line truncated to 4 chars)\n\n(Showing lines 1-1 of 2. Use offset=2 to continue.)",
	} {
		if got := shown(call(t, p, inSession, "read", arguments)); !strings.Contains(got, "\n"+want+"\n") {
			t.Errorf("%s: %q", arguments, got)
		}
	}
	if r := call(t, p, inSession, "read", `{"file_path":"three.txt","limit":4}`); shown(r) != "limit must be less than or equal to 3" {
		t.Errorf("%q", shown(r))
	}
}

func TestWriteAndEdit(t *testing.T) {
	root := realDir(t)
	p := start(t, newWorld("workspace-write", root))
	envelope := func(name, body string) string {
		return "<path>" + root + "/" + name + "</path>\n<type>file</type>\n<content>\n" + body + "\n</content>"
	}
	for _, c := range []struct{ tool, arguments, want, code, file, holds string }{
		{"write", arguments("file_path", "a.txt", "content", "one\n"), envelope("a.txt", "Created file"), "", "a.txt", "one\n"},
		{"write", arguments("file_path", root+"/a.txt", "content", "one one\n"), envelope("a.txt", "Updated file"), "", "a.txt", "one one\n"},
		{"edit", arguments("file_path", "a.txt", "old_string", "one", "new_string", "two"), `old_string matched 2 times in "` + root + `/a.txt"; provide a more specific old_string or set replace_all to true`, fs.AmbiguousEdit, "a.txt", "one one\n"},
		{"edit", arguments("file_path", "a.txt", "old_string", "one", "new_string", "two", "replace_all", true), "The file " + root + "/a.txt has been updated. All occurrences were successfully replaced.", "", "a.txt", "two two\n"},
		{"edit", arguments("file_path", "a.txt", "old_string", "two\n", "new_string", ""), "The file " + root + "/a.txt has been updated successfully.", "", "a.txt", "two "},
		{"edit", arguments("file_path", "a.txt", "old_string", "one", "new_string", "x"), `old_string was not found in "` + root + `/a.txt"`, fs.EditNotFound, "a.txt", "two "},
		{"edit", arguments("file_path", "none.txt", "old_string", "one", "new_string", "x"), `cannot edit "` + root + `/none.txt": file changed since it was read — re-read the file, then retry`, fs.StaleVersion, "none.txt", "(none)"},
		{"write", arguments("file_path", "empty.txt", "content", ""), envelope("empty.txt", "Created file"), "", "empty.txt", ""},
		{"write", arguments("file_path", "d/e/f.txt", "content", "x"), envelope("d/e/f.txt", "Created file"), "", "d/e/f.txt", "x"},
		{"write", arguments("file_path", "d", "content", "x"), `cannot write "` + root + `/d": not a regular file`, fs.NotRegularFile, "", ""},
	} {
		r := call(t, p, inSession, c.tool, c.arguments)
		if shown(r) != c.want || r.GetErrorCode() != c.code || r.GetIsError() != (c.code != "") {
			t.Errorf("%s %s: %q (%s)\nwant %q", c.tool, c.arguments, shown(r), r.GetErrorCode(), c.want)
		}
		if c.file != "" && content(t, filepath.Join(root, c.file)) != c.holds {
			t.Errorf("%s %s: the file holds %q", c.tool, c.arguments, content(t, filepath.Join(root, c.file)))
		}
	}
}

func TestRequest(t *testing.T) {
	for _, c := range []struct {
		name, tool, arguments string
		noPolicy              bool
		want                  proto.Message
		err                   string
	}{
		{name: "a relative path is one below the session's root", tool: "read", arguments: `{"file_path":"a/b"}`, want: &fsv1.ReadRequest{Path: "/ws/a/b", Offset: 1, Limit: 2000, MaxBytes: 51200, MaxLine: 2000}},
		{name: "`..` is left for the walk", tool: "read", arguments: `{"file_path":"a/../b","offset":5,"limit":6}`, want: &fsv1.ReadRequest{Path: "/ws/a/../b", Offset: 5, Limit: 6, MaxBytes: 51200, MaxLine: 2000}},
		{name: "an absolute path stays", tool: "write", arguments: `{"file_path":"/else/where","content":"x"}`, want: &fsv1.WriteRequest{Path: "/else/where", Content: []byte("x")}},
		{name: "a separator at the end stays", tool: "write", arguments: `{"file_path":"d/","content":"x"}`, want: &fsv1.WriteRequest{Path: "/ws/d/", Content: []byte("x")}},
		{name: "edit", tool: "edit", arguments: `{"file_path":"a","old_string":"b","new_string":"c","replace_all":true}`, want: &fsv1.EditRequest{Path: "/ws/a", OldString: "b", NewString: "c", ReplaceAll: true}},
		{name: "an absolute path without a policy", noPolicy: true, tool: "read", arguments: `{"file_path":"/a"}`, want: &fsv1.ReadRequest{Path: "/a", Offset: 1, Limit: 2000, MaxBytes: 51200, MaxLine: 2000}},
		{name: "a relative path without a policy", noPolicy: true, tool: "write", arguments: `{"file_path":"a","content":""}`, err: `file_path "a" is relative`},
		{name: "reading one without a policy", noPolicy: true, tool: "read", arguments: `{"file_path":"a"}`, err: `file_path "a" is relative`},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld("workspace-write", "/ws")
			stop := fault.New(codes.FailedPrecondition, "STOP", "stop")
			var got proto.Message
			w.fail = func(m proto.Message) error {
				if _, ok := m.(*policyv1.ResolveRequest); ok {
					return nil
				}
				got = m
				return stop
			}
			p := plugintest.Start(t, Plugin, w.options(!c.noPolicy, !c.noPolicy, true)...)
			r := call(t, p, inSession, c.tool, c.arguments)
			if c.err != "" {
				if !strings.HasPrefix(shown(r), c.err) || got != nil {
					t.Errorf("%q, asked %v", shown(r), got)
				}
				return
			}
			if got == nil || !proto.Equal(got, c.want) { // built from the checked arguments alone
				t.Errorf("asked %v, want %v", got, c.want)
			}
		})
	}
}

func TestMeta(t *testing.T) {
	root := realDir(t)
	put(t, root, "a.txt", "a\nb\n")
	p := start(t, newWorld("workspace-write", root))
	for _, c := range []struct {
		tool, arguments string
		want            map[string]any
	}{
		{"read", `{"file_path":"a.txt","limit":1}`, map[string]any{"mode": "workspace-write", "denied": false, "path": root + "/a.txt", "totalLines": 2.0}},
		{"write", `{"file_path":"b.txt","content":""}`, map[string]any{"mode": "workspace-write", "denied": false, "path": root + "/b.txt", "created": true}},
		{"edit", `{"file_path":"a.txt","old_string":"a","new_string":"c"}`, map[string]any{"mode": "workspace-write", "denied": false, "path": root + "/a.txt", "replacements": 1.0}},
	} {
		var got map[string]any
		must(t, json.Unmarshal(call(t, p, inSession, c.tool, c.arguments).GetMeta(), &got))
		if got["version"] == "" {
			t.Errorf("%s: no version", c.tool)
		}
		delete(got, "version")
		if d := cmp.Diff(c.want, got); d != "" {
			t.Errorf("%s: %s", c.tool, d)
		}
	}
}

const hint = "[sandbox: escalation available — retry this exact operation once with sandbox_permissions (the narrowest wider mode that suffices) + justification; the approval prompt asks the user]"

// a denied write maps to the shared marker plus the escalation hint (isError)
func TestDenial(t *testing.T) {
	for _, c := range []struct{ tool, arguments, mode, want string }{
		{"write", `{"file_path":"a","content":"x"}`, "read-only", "[sandbox: file access denied under read-only mode]\n" + hint},
		{"edit", `{"file_path":"a","old_string":"x","new_string":"y"}`, "workspace-write", "[sandbox: file access denied under workspace-write mode]\n" + hint},
		// read cannot ask for more, so it does not offer to.
		{"read", `{"file_path":"a"}`, "read-only", "[sandbox: file access denied under read-only mode]"},
		// The mode is the one that was asked for, when the wider one does not suffice either.
		{"write", `{"file_path":"a","content":"x","sandbox_permissions":"workspace-write","justification":"x"}`, "read-only", "[sandbox: file access denied under workspace-write mode]\n" + hint},
	} {
		w := newWorld(c.mode, "/ws")
		w.fail = func(m proto.Message) error {
			switch m.(type) {
			case *fsv1.ReadRequest, *fsv1.WriteRequest, *fsv1.EditRequest:
				return fs.ErrSandbox(fs.Write, "/ws/a", sandbox.Mode(c.mode))
			}
			return nil
		}
		r := call(t, start(t, w), inSession, c.tool, c.arguments)
		if !r.GetIsError() || r.GetErrorCode() != "FS_SANDBOX_DENIED" || shown(r) != c.want || !strings.Contains(string(r.GetMeta()), `"denied":true`) {
			t.Errorf("%s: %q (%s) %s\nwant %q", c.tool, shown(r), r.GetErrorCode(), r.GetMeta(), c.want)
		}
	}
}

// Faults come out as their text and reason, with what can be done about them.
func TestFaults(t *testing.T) {
	for _, c := range []struct {
		err        error
		text, code string
	}{
		{fs.ErrChanged(fs.Write, "/a"), `cannot write "/a": file changed since it was read — re-read the file, then retry`, fs.StaleVersion},
		{fs.ErrOverwrite("/a"), `cannot overwrite existing "/a" without reading it first — read the file, then retry`, fs.NotObserved},
		{fs.ErrPermission(fs.Write, "/a"), `cannot write "/a": permission denied`, fs.PermissionDenied},
		{fs.ErrIO(fs.Write, "/a", "100% full"), `cannot write "/a": 100% full`, fs.IOError},
		{status.Error(codes.Unavailable, "connection lost"), "connection lost", ""},
	} {
		w := newWorld("workspace-write", "/ws")
		w.fail = func(m proto.Message) error {
			if _, ok := m.(*fsv1.WriteRequest); ok {
				return c.err
			}
			return nil
		}
		r := call(t, start(t, w), inSession, "write", `{"file_path":"a","content":"x"}`)
		if !r.GetIsError() || shown(r) != c.text || r.GetErrorCode() != c.code {
			t.Errorf("%q (%s), want %q (%s)", shown(r), r.GetErrorCode(), c.text, c.code)
		}
	}
	w := newWorld("", "")
	w.resolve = func() (*policyv1.ResolveReply, error) {
		return nil, fault.New(codes.FailedPrecondition, "UNKNOWN_MODE", "sandbox/mode carries unknown mode")
	}
	for tool, arguments := range map[string]string{"read": `{"file_path":"a"}`, "write": `{"file_path":"a","content":""}`, "edit": `{"file_path":"a","old_string":"x","new_string":"y"}`} {
		if r := call(t, start(t, w), inSession, tool, arguments); r.GetErrorCode() != "UNKNOWN_MODE" {
			t.Errorf("%s: %v", tool, r)
		}
	}
	if s := steps(w); s != "resolve resolve resolve" {
		t.Errorf("did %s", s)
	}
}

func TestEscalation(t *testing.T) {
	outcome := func(o string) func(context.Context, *approvalv1.ApprovalRequest) (*approvalv1.ApprovalReply, error) {
		return func(context.Context, *approvalv1.ApprovalRequest) (*approvalv1.ApprovalReply, error) {
			return &approvalv1.ApprovalReply{Outcome: o}, nil
		}
	}
	for _, c := range []struct {
		name      string
		mode      string
		to        string
		call      plugin.Call
		noService bool
		answer    func(context.Context, *approvalv1.ApprovalRequest) (*approvalv1.ApprovalReply, error)
		steps     string
		want      string
		code      string
	}{
		{name: "an approved escalation carries its grant", mode: "read-only", to: "workspace-write", call: inSession, steps: "resolve resolve approval *"},
		{name: "the session routes the question where a front end names no agent", mode: "read-only", to: "workspace-write", call: plugin.Call{Session: "s"}, steps: "resolve resolve approval *"},
		{name: "evaluates widening against the session's mode", mode: "workspace-write", to: "danger-full-access", call: inSession, steps: "resolve resolve approval *"},
		{name: "rejects non-widening escalation without prompting", mode: "workspace-write", to: "workspace-write", call: inSession, steps: "resolve",
			want: `sandbox escalation to "workspace-write" is not strictly wider than this call's current "workspace-write" mode`, code: "ESCALATION_NOT_WIDER"},
		{name: "escalation without an approval service fails closed", mode: "read-only", to: "workspace-write", call: inSession, noService: true, steps: "resolve",
			want: `sandbox escalation to "workspace-write" requires approval, but no approval service is composed`, code: "ESCALATION_NO_APPROVAL"},
		{name: "escalation with an approval service but no agent fails closed", mode: "read-only", to: "workspace-write", steps: "resolve",
			want: `sandbox escalation to "workspace-write" requires approval, but the call has no agent to route it through`, code: "ESCALATION_NO_AGENT"},
		{name: "a rejected escalation fails closed with its own text and never mutates", mode: "read-only", to: "workspace-write", call: inSession, answer: outcome("rejected"), steps: "resolve resolve approval",
			want: `the user rejected escalating this operation to "workspace-write"`, code: "ESCALATION_REJECTED"},
		{name: "cancelled", mode: "read-only", to: "workspace-write", call: inSession, answer: outcome("cancelled"), steps: "resolve resolve approval",
			want: `approval for escalating to "workspace-write" was cancelled`, code: "ESCALATION_CANCELLED"},
		{name: "unavailable", mode: "read-only", to: "danger-full-access", call: inSession, answer: outcome("unavailable"), steps: "resolve resolve approval",
			want: `sandbox escalation to "danger-full-access" requires approval, but no approval channel is available`, code: "ESCALATION_UNAVAILABLE"},
		{name: "an outcome outside the vocabulary", mode: "read-only", to: "workspace-write", call: inSession, answer: outcome("always"), steps: "resolve resolve approval",
			want: "unreachable variant in EscalationOutcome", code: "ESCALATION_UNRECOGNIZED"},
		{name: "an allowance without a grant", mode: "read-only", to: "workspace-write", call: inSession, answer: outcome("allowed-once"), steps: "resolve resolve approval",
			want: `approval for escalating to "workspace-write" came without a grant`, code: "ESCALATION_UNRECOGNIZED"},
		{name: "approval itself fails", mode: "read-only", to: "workspace-write", call: inSession, steps: "resolve resolve approval",
			answer: func(context.Context, *approvalv1.ApprovalRequest) (*approvalv1.ApprovalReply, error) {
				return nil, fault.New(codes.Unavailable, "PLUGIN_CRASHED", "user-approval ended")
			}, want: "user-approval ended", code: "PLUGIN_CRASHED"},
	} {
		for _, tool := range []string{"write", "edit"} {
			t.Run(c.name+"/"+tool, func(t *testing.T) {
				root := realDir(t)
				path := put(t, root, "a.txt", "old\n")
				w := newWorld(c.mode, root)
				if c.answer != nil {
					w.answer = c.answer
				}
				p := plugintest.Start(t, Plugin, w.options(true, true, !c.noService)...)
				args := arguments("file_path", "a.txt", "content", "new\n", "sandbox_permissions", c.to, "justification", "to save")
				if tool == "edit" {
					args = arguments("file_path", "a.txt", "old_string", "old", "new_string", "new", "sandbox_permissions", c.to, "justification", "to save")
				}
				r := call(t, p, c.call, tool, args)
				if got, want := steps(w), strings.Replace(c.steps, "*", tool, 1); got != want {
					t.Errorf("did %q, want %q", got, want)
				}
				if c.want != "" {
					if !r.GetIsError() || shown(r) != c.want || r.GetErrorCode() != c.code || content(t, path) != "old\n" {
						t.Errorf("%q (%s), want %q (%s); the file holds %q", shown(r), r.GetErrorCode(), c.want, c.code, content(t, path))
					}
					return
				}
				_, wrote := did[*fsv1.WriteRequest](w)
				_, edited := did[*fsv1.EditRequest](w)
				if grant := wrote.GetGrant() + edited.GetGrant(); r.GetIsError() || grant != "g1" || content(t, path) != "new\n" {
					t.Errorf("%q, grant %q, the file holds %q", shown(r), grant, content(t, path))
				}
				// The next call carries none: an approval holds for one.
				w.steps = nil
				call(t, p, c.call, "write", `{"file_path":"a.txt","content":"x"}`)
				if _, wrote := did[*fsv1.WriteRequest](w); wrote.GetGrant() != "" {
					t.Errorf("wrote with grant %q", wrote.GetGrant())
				}
			})
		}
	}
}

// sandbox_permissions under a non-confining backend fails closed (unadvertised field still reaches execute)
func TestEscalationWithoutSandbox(t *testing.T) {
	for tool, arguments := range map[string]string{
		"write": `{"file_path":"a","content":"x","sandbox_permissions":"workspace-write","justification":"x"}`,
		"edit":  `{"file_path":"a","old_string":"x","new_string":"y","sandbox_permissions":"workspace-write","justification":"x"}`,
	} {
		w := newWorld("read-only", "/")
		p := plugintest.Start(t, Plugin, w.options(false, true, true)...)
		r := call(t, p, inSession, tool, arguments)
		if s := steps(w); s != "" || shown(r) != "sandbox_permissions is not available in this composition (no sandboxing filesystem to escalate)" {
			t.Errorf("%s: %q, did %q", tool, shown(r), s)
		}
	}
}

func TestQuestion(t *testing.T) {
	root := realDir(t)
	put(t, root, "a.txt", "one\ntwo\n")
	w := newWorld("read-only", root)
	p := start(t, w)
	call(t, p, inSession, "write", arguments("file_path", "b.txt", "content", "x\ny\n", "sandbox_permissions", "workspace-write", "justification", "to save"))
	_, got := did[*approvalv1.ApprovalRequest](w)
	want := &approvalv1.ApprovalRequest{
		Tool: "write", Reason: "escalate sandbox to workspace-write: to save",
		Widening: &approvalv1.Widening{From: "read-only", To: "workspace-write", Capability: "fs"},
		Subject:  &approvalv1.Subject{Kind: "operation", Text: "write " + root + "/b.txt\n+ x\n+ y", Cwd: root},
	}
	if !proto.Equal(got, want) {
		t.Errorf("asked %v, want %v", got, want)
	}
	call(t, p, inSession, "edit", arguments("file_path", root+"/a.txt", "old_string", "one\ntwo", "new_string", "three", "sandbox_permissions", "danger-full-access", "justification", "to save"))
	_, got = did[*approvalv1.ApprovalRequest](w)
	want.Tool, want.Reason, want.Widening.To, want.Subject.Text = "edit", "escalate sandbox to danger-full-access: to save", "danger-full-access", "edit "+root+"/a.txt\n- one\n- two\n+ three"
	if !proto.Equal(got, want) {
		t.Errorf("asked %v, want %v", got, want)
	}
	// A person is shown where a path leads, and nothing else is changed than that.
	outside := put(t, realDir(t), "secret.txt", "old\n")
	must(t, os.Symlink(outside, root+"/harmless.txt"))
	w.answer = func(context.Context, *approvalv1.ApprovalRequest) (*approvalv1.ApprovalReply, error) {
		must(t, os.Remove(root+"/harmless.txt"))
		must(t, os.Symlink(root+"/a.txt", root+"/harmless.txt"))
		return &approvalv1.ApprovalReply{Outcome: "allowed-once", Grant: "g1"}, nil
	}
	r := call(t, p, inSession, "write", arguments("file_path", "harmless.txt", "content", "x", "sandbox_permissions", "danger-full-access", "justification", "to save"))
	_, got = did[*approvalv1.ApprovalRequest](w)
	if want := "write " + root + "/harmless.txt\n(which is " + outside + ")\n+ x"; got.GetSubject().GetText() != want {
		t.Errorf("asked %q, want %q", got.GetSubject().GetText(), want)
	}
	if r.GetErrorCode() != fs.StaleVersion || content(t, outside) != "old\n" || content(t, root+"/a.txt") == "x" {
		t.Errorf("a link that was swapped during the question: %q; %q", shown(r), content(t, root+"/a.txt"))
	}
	if _, asked := did[*fsv1.ResolveRequest](w); asked.GetMode() != "danger-full-access" {
		t.Errorf("resolved in %q", asked.GetMode())
	}
	big := strings.Repeat("é", maxShown)
	text := renderQuestion("write", "/a", "/a", big)
	if len(text) > maxShown+100 || !strings.HasSuffix(text, fmt.Sprintf("\n(%d more bytes are not shown)", maxShown)) {
		t.Errorf("a big file: %d bytes, ends in %q", len(text), text[len(text)-40:])
	}
}

// An operation ends with its caller.
func TestAbort(t *testing.T) {
	w := newWorld("workspace-write", "/")
	running, ended := make(chan struct{}), make(chan struct{})
	w.answer = func(ctx context.Context, _ *approvalv1.ApprovalRequest) (*approvalv1.ApprovalReply, error) {
		close(running)
		<-ctx.Done()
		close(ended)
		return nil, ctx.Err()
	}
	p := start(t, w)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := p.CallTool(p.Stamp(ctx, inSession), "write", `{"file_path":"a","content":"","sandbox_permissions":"danger-full-access","justification":"x"}`)
		done <- err
	}()
	<-running
	cancel()
	<-ended
	if err := <-done; status.Code(err) != codes.Canceled {
		t.Errorf("error %v", err)
	}
	if err := aborted(ctx, errors.New("whatever")); fault.Reason(err) != "ABORTED" || fault.Message(err) != "tool call aborted" {
		t.Errorf("error %v", err)
	}
}
