package main

import (
	"fmt"
	"math"
	"os"

	policyv1 "github.com/cordon-host/cordon/api/policy/v1"
	sandboxv1 "github.com/cordon-host/cordon/api/sandbox/v1"
	shellv1 "github.com/cordon-host/cordon/api/shell/v1"
	"github.com/cordon-host/cordon/capability/sandbox"
	"github.com/cordon-host/cordon/capability/shell"
	"github.com/cordon-host/cordon/plugin"
)

// Config is the row's config. The defaults are the reference system's.
type Config struct {
	TimeoutMs      int64 `json:"timeoutMs,omitempty" jsonschema:"default=120000" jsonschema_description:"Time limit of a command that asks for none, in milliseconds."`
	MaxTimeoutMs   int64 `json:"maxTimeoutMs,omitempty" jsonschema:"default=600000" jsonschema_description:"Longest time limit a command can ask for, in milliseconds."`
	MaxOutputBytes int64 `json:"maxOutputBytes,omitempty" jsonschema:"default=64000" jsonschema_description:"How much of the end of each output stream a result holds, in bytes."`
	MaxSpillBytes  int64 `json:"maxSpillBytes,omitempty" jsonschema:"default=67108864" jsonschema_description:"Largest output that is kept whole in a file when it is longer than maxOutputBytes, in bytes."`
	GraceMs        int64 `json:"graceMs,omitempty" jsonschema:"default=3000" jsonschema_description:"Time between SIGTERM and SIGKILL, and how long output is waited for after the end of a command, in milliseconds."`
}

// maxOutputBytes keeps a result with two streams below the largest message.
const maxOutputBytes = plugin.MaxMessageSize / 4

func defaults() Config {
	return Config{TimeoutMs: 120_000, MaxTimeoutMs: 600_000, MaxOutputBytes: 64_000, MaxSpillBytes: 64 << 20, GraceMs: 3_000}
}

func (c Config) validate() error {
	for _, f := range []struct {
		name  string
		value int64
		limit int64
	}{
		{"timeoutMs", c.TimeoutMs, math.MaxInt32},
		{"maxTimeoutMs", c.MaxTimeoutMs, math.MaxInt32},
		{"maxOutputBytes", c.MaxOutputBytes, maxOutputBytes},
		{"maxSpillBytes", c.MaxSpillBytes, math.MaxInt64},
		{"graceMs", c.GraceMs, math.MaxInt32},
	} {
		switch {
		case f.value <= 0:
			return fmt.Errorf("shell-sandbox: %s must be a positive finite number", f.name)
		case f.value > f.limit:
			return fmt.Errorf("shell-sandbox: %s must be no greater than %d", f.name, f.limit)
		}
	}
	return nil
}

// Plugin is the plugin.
var Plugin = plugin.Plugin[Config]{
	Name: "shell-sandbox", Version: "0.1.0",
	Unconfined: true, // see docs/threat-model.md
	Needs: []plugin.Need{
		{Capability: "sandbox", Desc: &sandboxv1.Sandbox_ServiceDesc},
		{Capability: "policy", Desc: &policyv1.Policy_ServiceDesc},
	},
	Offers:   []plugin.Offer{{Capability: "shell", Desc: &shellv1.Shell_ServiceDesc}},
	Confines: true,
	Default:  defaults,
	Apply:    apply,
}

func apply(ctx *plugin.Context, cfg Config) error {
	if err := cfg.validate(); err != nil {
		return err
	}
	// Published as read at Apply: whoever needs the shell is applied again when it changes.
	var policy struct {
		DefaultMode sandbox.Mode `json:"defaultMode"`
	}
	if _, err := ctx.Facts("policy", &policy); err != nil {
		return err
	}
	if policy.DefaultMode == "" {
		policy.DefaultMode = sandbox.ReadOnly
	}
	spill := ctx.Deployment().GetOutputDir() // without one, long output is cut and the result says so
	if spill != "" {
		if err := os.MkdirAll(spill, 0o700); err != nil {
			return fmt.Errorf("shell-sandbox: directory for long output: %w", err)
		}
	}
	policyConn, _ := ctx.Conn("policy")
	sandboxConn, _ := ctx.Conn("sandbox")
	return ctx.Provide("shell", &shellServer{
		plugin: ctx, cfg: cfg, spill: spill,
		policy: policyv1.NewPolicyClient(policyConn), sandbox: sandboxv1.NewSandboxClient(sandboxConn),
		environ: os.Environ(),
	}, shell.Facts{SandboxMode: policy.DefaultMode, Confines: true})
}
