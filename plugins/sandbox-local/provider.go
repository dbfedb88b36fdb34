package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"google.golang.org/grpc/codes"

	sandboxv1 "github.com/cordon-host/cordon/api/sandbox/v1"
	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/capability/sandbox"
)

// Fault reasons of this provider beside sandbox.ReasonUnavailable.
const (
	// reasonInvalid: the request itself is malformed.
	reasonInvalid = "INVALID_REQUEST"
	// reasonNotExpressible: the policy is clear, but no runner can enforce it on this tree. The command does not run.
	reasonNotExpressible = "POLICY_NOT_EXPRESSIBLE"
)

// surroundings are what a sandbox has to know of the deployment.
type surroundings struct {
	stateDir  string   // this row's own
	tempDir   string   // sessions have their temp directories below it
	root      string   // directory of the compose file
	hidden    []string // no confined process may see them
	protected []string // read-only, also inside a writable root
	getenv    func(string) string
}

// request is a checked ConfineRequest.
type request struct {
	argv    []string
	cwd     string
	mode    sandbox.Mode
	root    string
	session string
}

// runner is one way to confine on this platform.
type runner interface {
	name() string
	// probe finds out whether the runner works by running something in it, until ctx ends. It returns what confines, nil if
	// the runner is not usable.
	probe(ctx context.Context) (confiner, *sandboxv1.RunnerReport)
}

// confiner is a runner that has been found to work.
type confiner interface {
	name() string
	confine(request) (*sandboxv1.ConfineReply, error)
	enforcement() *sandboxv1.Enforcement
}

// provider is the Sandbox service. The runner is chosen at the first call that needs one, by trying the candidates in
// order; what came out, also that none works, stands until the plugin is reloaded or somebody asks Inspect to try
// again. It is logged once.
type provider struct {
	sandboxv1.UnimplementedSandboxServer
	log     *slog.Logger
	runners []runner
	cfg     Config

	mu        sync.Mutex // held while probing: callers at the same time wait for one verdict
	verdict   *verdict
	explained map[string]bool // reasons that have been logged
}

type verdict struct {
	selected confiner // nil: none is usable
	reports  []*sandboxv1.RunnerReport
	// late: a probe ran out of time. That says more about the machine at this moment than about the runner, so it stands
	// for the calls that waited for it and no longer.
	late bool
}

func newProvider(cfg Config, log *slog.Logger, in surroundings) *provider {
	p := &provider{log: log, cfg: cfg, explained: make(map[string]bool)}
	for _, r := range platformRunners(cfg, in) {
		if cfg.Runner == "auto" || cfg.Runner == r.name() {
			p.runners = append(p.runners, r)
		}
	}
	return p
}

// Confine wraps argv. See the contract.
func (p *provider) Confine(_ context.Context, in *sandboxv1.ConfineRequest) (*sandboxv1.ConfineReply, error) {
	req, err := check(in)
	if err != nil {
		return nil, err
	}
	v := p.choose(false)
	if v.selected == nil {
		return nil, sandbox.Unavailable(req.mode, v.explain())
	}
	return v.selected.confine(req)
}

// Inspect reports on the runners. See the contract.
func (p *provider) Inspect(_ context.Context, in *sandboxv1.InspectRequest) (*sandboxv1.InspectReply, error) {
	v := p.choose(in.GetProbeAgain())
	reply := &sandboxv1.InspectReply{Runners: v.reports}
	if v.selected != nil {
		reply.Selected = v.selected.name()
		reply.Enforcement = v.selected.enforcement()
	}
	return reply, nil
}

// choose is the verdict. A caller that goes away does not end the probe: its outcome is everybody's.
func (p *provider) choose(again bool) *verdict {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.verdict != nil && !p.verdict.late && !again {
		return p.verdict
	}
	v := &verdict{}
	for _, r := range p.runners {
		ctx, cancel := context.WithTimeout(context.Background(), p.cfg.probeTimeout())
		usable, report := r.probe(ctx)
		report.Usable = usable != nil
		v.late = v.late || usable == nil && ctx.Err() != nil
		cancel()
		v.reports = append(v.reports, report)
		if usable != nil {
			v.selected, v.late = usable, false
			p.log.Info("sandbox runner selected", "runner", r.name(), "version", report.GetVersion())
			break
		}
		if p.explained[report.GetReason()] {
			continue
		}
		p.explained[report.GetReason()] = true
		p.log.Warn("sandbox runner is not usable", "runner", r.name(), "reason", report.GetReason(), "fix", report.GetFix())
	}
	if len(p.runners) == 0 {
		v.reports = append(v.reports, noRunner(p.cfg))
	}
	p.verdict = v
	return v
}

// explain tells why no runner is usable, in one line.
func (v *verdict) explain() string {
	var all []string
	for _, r := range v.reports {
		s := r.GetName() + ": " + r.GetReason()
		if r.GetFix() != "" {
			s += " (fix: " + r.GetFix() + ")"
		}
		all = append(all, s)
	}
	return strings.Join(all, "; ")
}

// check validates what does not depend on a runner.
func check(in *sandboxv1.ConfineRequest) (request, error) {
	req := request{argv: in.GetArgv(), cwd: in.GetCwd(), mode: sandbox.Mode(in.GetMode()), root: in.GetWorkspaceRoot(), session: in.GetSession()}
	bad := func(format string, args ...any) (request, error) {
		return request{}, fault.New(codes.InvalidArgument, reasonInvalid, format, args...)
	}
	if len(req.argv) == 0 || req.argv[0] == "" {
		return bad("invalid argv: expected a non-empty program name at argv[0]")
	}
	if strings.HasPrefix(req.argv[0], "-") {
		// Shells disagree on whether exec takes options, and on `--`.
		return bad("invalid argv: program name %q starts with a dash; name it by its path", req.argv[0])
	}
	if req.mode != sandbox.ReadOnly && req.mode != sandbox.WorkspaceWrite {
		return bad("invalid mode %q: a sandbox confines to read-only or workspace-write", in.GetMode())
	}
	for _, p := range []struct{ field, path string }{{"workspace root", req.root}, {"working directory", req.cwd}} {
		if !filepath.IsAbs(p.path) || strings.ContainsRune(p.path, 0) {
			return bad("invalid %s %q: expected an absolute path", p.field, p.path)
		}
		fi, err := os.Stat(p.path)
		if err != nil {
			return bad("invalid %s %q: %v", p.field, p.path, err)
		}
		if !fi.IsDir() {
			return bad("invalid %s %q: not a directory", p.field, p.path)
		}
	}
	if c := sandbox.CanonicalPath(req.root); c != req.root {
		return bad("invalid workspace root %q: expected the canonical path %q", req.root, c)
	}
	return req, nil
}

func notExpressible(format string, args ...any) error {
	return fault.New(codes.FailedPrecondition, reasonNotExpressible, "policy not expressible: %s", fmt.Sprintf(format, args...))
}

var _ sandboxv1.SandboxServer = (*provider)(nil)
