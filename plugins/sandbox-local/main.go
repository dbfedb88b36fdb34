// Command sandbox-local is the plugin that provides the sandbox capability on this machine. It turns a command into a
// launch that runs it confined, and never runs a command itself.
//
// One runner exists so far: bubblewrap, on Linux. What it confines to is told in profile_linux.go; that it holds is
// shown by escape_test.go.
package main

import (
	"fmt"
	"math"
	"os"
	"time"

	sandboxv1 "github.com/cordon-host/cordon/api/sandbox/v1"
	"github.com/cordon-host/cordon/plugin"
	"github.com/cordon-host/cordon/plugin/launch"
)

// Config is the row's config.
type Config struct {
	// Runner pins a runner by name; auto takes the first one that works.
	Runner string `json:"runner,omitempty" jsonschema:"enum=auto,enum=bwrap,default=auto,description=Runner to use; auto takes the first one that works on this host."`
	// ProbeTimeoutMs bounds the trial of one runner. A trial starts one small command; one that takes longer than this
	// would make every command of a session feel broken.
	ProbeTimeoutMs float64 `json:"probeTimeoutMs,omitempty" jsonschema:"exclusiveMinimum=0,default=2000,description=Limit for trying out one runner in milliseconds."`
}

// Plugin is the plugin's value.
var Plugin = plugin.Plugin[Config]{
	Name:       "sandbox-local",
	Version:    "0.1.0",
	Unconfined: true, // see docs/threat-model.md
	Offers:     []plugin.Offer{{Capability: "sandbox", Desc: &sandboxv1.Sandbox_ServiceDesc}},
	Default:    func() Config { return Config{Runner: "auto", ProbeTimeoutMs: 2000} },
	Apply:      apply,
}

func main() {
	// Descriptors that a careless parent left open would go on into every runner.
	if err := launch.CloseOnExec(); err != nil {
		fmt.Fprintln(os.Stderr, "sandbox-local:", err)
		os.Exit(1)
	}
	plugin.Main(Plugin)
}

func apply(ctx *plugin.Context, cfg Config) error {
	if err := cfg.check(); err != nil {
		return err
	}
	d := ctx.Deployment()
	return ctx.Provide("sandbox", newProvider(cfg, ctx.Logger(), surroundings{
		stateDir:  d.GetStateDir(),
		tempDir:   d.GetTempDir(),
		root:      d.GetRoot(),
		hidden:    d.GetHidden(),
		protected: d.GetProtected(),
		getenv:    os.Getenv,
	}), nil)
}

func (c Config) check() error {
	if !(c.ProbeTimeoutMs > 0) || math.IsInf(c.ProbeTimeoutMs, 0) {
		return fmt.Errorf("sandbox-local: probeTimeoutMs must be a positive finite number")
	}
	if c.Runner != "auto" && c.Runner != "bwrap" {
		return fmt.Errorf(`sandbox-local: runner must be one of "auto" or "bwrap", got %q`, c.Runner)
	}
	return nil
}

func (c Config) probeTimeout() time.Duration {
	// More than a day is as good as a day, and the product stays in range.
	return time.Duration(math.Min(c.ProbeTimeoutMs, 24*60*60*1000) * float64(time.Millisecond))
}
