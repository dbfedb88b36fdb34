package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	kernelv1 "github.com/cordon-host/cordon/api/kernel/v1"
	"github.com/cordon-host/cordon/host/build"
	"github.com/cordon-host/cordon/host/compose"
	"github.com/cordon-host/cordon/host/lock"
	"github.com/cordon-host/cordon/host/process"
	"github.com/cordon-host/cordon/host/trust"
)

// executable is what a row runs: a private copy of exactly the bytes with that digest.
type executable struct{ path, digest string }

// source is a composition on disk and everything in it that leads to execution.
type source struct {
	plan   *compose.Plan
	cache  *build.Cache
	inputs map[string]*build.Inputs // by row
	tree   *trust.Tree
	lock   *lock.File // nil when there is none
}

// read reads a composition. It lists what leads to execution; it builds and runs nothing.
func read(ctx context.Context, o Options, layout trust.Layout) (*source, error) {
	plan, diags := compose.Load(o.Compose, environment)
	if diags.HasErrors() {
		return nil, &CompositionError{diags}
	}
	cache, err := build.Open(layout.CacheDir)
	if err != nil {
		return nil, &EnvironmentError{err}
	}
	s := &source{plan: plan, cache: cache, inputs: map[string]*build.Inputs{}}
	accepted, sum, wrong := lock.Read(lock.Path(plan))
	diags = compose.Join(diags, wrong)
	var others []trust.File
	if s.lock = accepted; accepted != nil {
		others = append(others, trust.File{Path: lock.Path(plan), SHA256: sum})
	}
	var rows []*compose.Entry
	var dirs []string
	for _, row := range plan.Entries {
		if !row.Disabled && row.Kind == compose.Package {
			rows, dirs = append(rows, row), append(dirs, row.Target)
		}
	}
	for i, l := range cache.InputsAll(ctx, dirs) {
		if l.Err != nil {
			diags = append(diags, diagnose(plan, rows[i], "cannot be built", l.Err))
			continue
		}
		s.inputs[rows[i].ID] = l.Inputs
	}
	if diags.HasErrors() {
		return nil, &CompositionError{compose.Join(diags)}
	}
	if s.tree, err = trust.Survey(plan, s.inputs, others...); err != nil {
		return nil, &EnvironmentError{err}
	}
	return s, nil
}

// limitable are the rows that ask for limits which this machine cannot enforce, as try finds. Starting them without would promise
// something.
func limitable(plan *compose.Plan, try func(process.Limits) error) compose.Diagnostics {
	var out compose.Diagnostics
	for _, row := range plan.Entries {
		if row.Disabled {
			continue
		}
		var missing *process.LimitError
		if err := try(limitsOf(row)); errors.As(err, &missing) {
			d := plan.Diagnose(row, "limits", compose.CodeLimits, "limits of %s cannot be enforced on this machine: %s", row.ID, missing.Missing)
			d.Hints = append(d.Hints, missing.Fix)
			out = append(out, d)
		}
	}
	return out
}

func limitsOf(row *compose.Entry) process.Limits {
	return process.Limits{Memory: row.Limits.Memory, Pids: row.Limits.Pids}
}

// diagnose places a plugin's failure at its row, with what a compiler said as notes.
func diagnose(plan *compose.Plan, row *compose.Entry, what string, err error) *compose.Diagnostic {
	var failed *build.Error
	if !errors.As(err, &failed) {
		return plan.Diagnose(row, "use", compose.CodeBuild, "plugin of %s %s: %v", row.ID, what, err)
	}
	d := plan.Diagnose(row, "use", compose.CodeBuild, "plugin of %s %s", row.ID, what)
	d.Notes = strings.Split(strings.TrimSpace(failed.Output), "\n")
	if failed.Hint != "" {
		d.Hints = append(d.Hints, failed.Hint)
	}
	return d
}

// environment is what a compose file may interpolate. The working directory is the real one, whatever the variable says.
func environment(name string) (string, bool) {
	if name == "PWD" {
		dir, err := os.Getwd()
		return dir, err == nil
	}
	return os.LookupEnv(name)
}

// composition is a plan that holds together, with what each row runs.
type composition struct {
	*source
	executables map[string]executable
	manifests   map[string]*kernelv1.Manifest
	offering    map[string][]*compose.Entry // who offers a capability; nil is the host itself
}

// load reads the composition, asks whether it is trusted, and only then makes something of it that runs.
func (h *Host) load(ctx context.Context) (*composition, error) {
	s, err := read(ctx, h.options, h.layout)
	if err != nil {
		return nil, err
	}
	if err := trust.Open(h.layout.TrustDir).Check(s.tree); err != nil {
		return nil, err
	}
	return h.compose(ctx, s)
}

// compose builds and stages what the rows run, asks each what it is, and checks that all of it holds together.
func (h *Host) compose(ctx context.Context, s *source) (*composition, error) {
	c := &composition{source: s, offering: map[string][]*compose.Entry{}}
	if h.hosting {
		// Before any process is started: the host leaves its control group to those of the plugins while it is alone there.
		if diags := limitable(s.plan, process.PrepareLimits); diags.HasErrors() {
			return nil, &CompositionError{diags}
		}
	}
	var err error
	if c.executables, err = s.build(ctx); err != nil {
		return nil, err
	}
	if h.options.Locked {
		// Before anything is started, if only to be asked what it is.
		if err := c.lockedPrograms(); err != nil {
			return nil, err
		}
	}
	if c.manifests, err = h.describe(ctx, c); err != nil {
		return nil, err
	}
	if h.options.Locked {
		if err := c.lockedInterfaces(); err != nil {
			return nil, err
		}
	}
	builtins, err := builtinManifests()
	if err != nil {
		return nil, err
	}
	if diags := compose.Check(c.plan, c.manifests, builtins); diags.HasErrors() {
		return nil, &CompositionError{diags}
	}
	for _, m := range builtins {
		for _, o := range m.GetOffers() {
			c.offering[o.GetCapability()] = append(c.offering[o.GetCapability()], nil)
		}
	}
	for _, row := range c.plan.Entries {
		for _, o := range c.manifests[row.ID].GetOffers() {
			c.offering[o.GetCapability()] = append(c.offering[o.GetCapability()], row)
		}
	}
	return c, nil
}

// offered reports whether some enabled row, or the host, provides a capability where a row would look for it.
func (c *composition) offered(row *compose.Entry, capability string) bool {
	for _, e := range c.offering[capability] {
		if row == nil || e == nil || e.Realm(capability) == row.Realm(capability) {
			return true
		}
	}
	return false
}

// build builds what is built from source and copies what is not.
func (s *source) build(ctx context.Context) (map[string]executable, error) {
	out := map[string]executable{}
	var diags compose.Diagnostics
	var rows []*compose.Entry
	var ins []*build.Inputs
	for _, row := range s.plan.Entries {
		switch in := s.inputs[row.ID]; {
		case row.Disabled:
		case in != nil:
			rows, ins = append(rows, row), append(ins, in)
		default:
			b, err := s.cache.Stage(row.Target)
			if err == nil {
				err = s.tree.Same(row.Target, b.SHA256)
			}
			if err != nil {
				diags = append(diags, diagnose(s.plan, row, "cannot be run", err))
				continue
			}
			out[row.ID] = executable{b.Path, b.SHA256}
		}
	}
	for i, r := range s.cache.BuildAll(ctx, ins) {
		if r.Err != nil {
			diags = append(diags, diagnose(s.plan, rows[i], "does not build", r.Err))
			continue
		}
		out[rows[i].ID] = executable{r.Binary.Path, r.Binary.SHA256}
	}
	if diags.HasErrors() {
		return nil, &CompositionError{diags}
	}
	return out, nil
}

// describe asks each executable what it is. An answer is kept by the digest of the executable, so that a plugin is started for this
// once.
func (h *Host) describe(ctx context.Context, c *composition) (map[string]*kernelv1.Manifest, error) {
	dir := filepath.Join(h.layout.StateDir, "manifests")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, &EnvironmentError{err}
	}
	var mu sync.Mutex
	out := map[string]*kernelv1.Manifest{}
	var diags compose.Diagnostics
	var asking sync.WaitGroup
	for _, row := range c.plan.Entries {
		exe, ok := c.executables[row.ID]
		if !ok {
			continue
		}
		asking.Go(func() {
			m, err := h.manifest(ctx, row, exe, filepath.Join(dir, exe.digest+".pb"))
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				diags = append(diags, c.plan.Diagnose(row, "use", compose.CodeDescribe, "plugin of %s does not describe itself: %v", row.ID, err))
				return
			}
			out[row.ID] = m
		})
	}
	asking.Wait()
	if diags.HasErrors() {
		return nil, &CompositionError{diags}
	}
	return out, nil
}

// describeTimeout bounds what a plugin needs to say what it is; it has nothing to wait for.
const describeTimeout = 30 * time.Second

func (h *Host) manifest(ctx context.Context, row *compose.Entry, exe executable, cached string) (*kernelv1.Manifest, error) {
	m := &kernelv1.Manifest{}
	if raw, err := os.ReadFile(cached); err == nil && proto.Unmarshal(raw, m) == nil {
		return m, nil
	}
	h.hide(row, m)
	g, err := h.executable(row, exe.path, exe.digest, false)(ctx, 0, h.logs.Writer(row.ID, 0))
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, describeTimeout)
	defer cancel()
	m, err = g.Kernel().Describe(ctx, &kernelv1.DescribeRequest{})
	if err = errors.Join(err, g.Stop(ctx)); err != nil {
		return nil, err
	}
	raw, err := proto.Marshal(m)
	if err != nil {
		return nil, err
	}
	return m, writeFile(cached, raw)
}

// writeFile replaces a file in one step.
func writeFile(path string, data []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".new-*") // mode 0600
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}

// Validate checks a composition without mounting anything: it starts a plugin only to ask what it is, and only if that is not
// known yet. What it finds wrong is not an error. The second result is what the rows would run, empty if something is wrong.
func Validate(ctx context.Context, o Options) (compose.Diagnostics, []Runs, error) {
	h, err := prepare(o)
	if err != nil {
		return nil, nil, err
	}
	c, err := h.load(ctx)
	var wrong *CompositionError
	switch {
	case errors.As(err, &wrong):
		return wrong.Diagnostics, nil, nil
	case err != nil:
		return nil, nil, err
	}
	var rows []Runs
	for _, row := range c.plan.Entries {
		if exe, ok := c.executables[row.ID]; ok {
			rows = append(rows, Runs{row.ID, c.tier(row, exe.digest), exe.digest})
		}
	}
	// Another process will host it, from a control group of its own perhaps.
	unlimited := limitable(c.plan, process.Limitable)
	for _, d := range unlimited {
		d.Severity = compose.Warning
	}
	return unlimited, rows, nil
}

// Runs is what a row would run.
type Runs struct {
	Entry  string `json:"id"`
	Tier   Tier   `json:"tier"`
	Digest string `json:"digest"`
}

// Trusted is what Trust recorded.
type Trusted struct {
	Compose string
	Digest  string
	Files   int
}

// Trust records that a person trusts a composition as it is now: the compose file and everything that leads to execution.
func Trust(ctx context.Context, o Options) (*Trusted, error) {
	layout, err := trust.LayoutOf(o.Compose, o.State)
	if err != nil {
		return nil, &EnvironmentError{err}
	}
	s, err := read(ctx, o, layout)
	if err != nil {
		return nil, err
	}
	if err := trust.Open(layout.TrustDir).Trust(s.tree); err != nil {
		return nil, &EnvironmentError{fmt.Errorf("trust: %w", err)}
	}
	return &Trusted{Compose: s.plan.Path, Digest: s.tree.Digest(), Files: s.tree.Len()}, nil
}
