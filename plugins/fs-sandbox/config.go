package main

import (
	"fmt"

	fsv1 "github.com/cordon-host/cordon/api/fs/v1"
	policyv1 "github.com/cordon-host/cordon/api/policy/v1"
	"github.com/cordon-host/cordon/capability/fs"
	"github.com/cordon-host/cordon/capability/sandbox"
	"github.com/cordon-host/cordon/plugin"
	"github.com/cordon-host/cordon/plugin/fskit"
)

// Config is the row's config.
type Config struct {
	MaxEditBytes int64 `json:"maxEditBytes,omitempty" jsonschema:"default=33554432" jsonschema_description:"Largest file that can be edited, in bytes; larger ones can be read and replaced."`
}

// What one read gives at most: a reply stays below the largest message, and a file of nothing but line ends does not grow into
// many times its size.
const (
	maxReadBytes = plugin.MaxMessageSize / 4
	maxReadLines = 1 << 18
)

// What a read without limits gets: the reference system's defaults.
const (
	defaultLines     = 2000
	defaultReadBytes = 50 << 10
)

func defaults() Config { return Config{MaxEditBytes: fskit.DefaultMaxEditBytes} }

func (c Config) validate() error {
	if c.MaxEditBytes <= 0 || c.MaxEditBytes > 1<<30 {
		return fmt.Errorf("fs-sandbox: maxEditBytes must be a positive number no greater than %d", 1<<30)
	}
	return nil
}

// Plugin is the plugin.
var Plugin = plugin.Plugin[Config]{
	Name: "fs-sandbox", Version: "0.1.0",
	Unconfined: true, // see docs/threat-model.md
	Needs:      []plugin.Need{{Capability: "policy", Desc: &policyv1.Policy_ServiceDesc}},
	Offers:     []plugin.Offer{{Capability: "fs", Desc: &fsv1.Fs_ServiceDesc}},
	Confines:   true,
	Default:    defaults,
	Apply:      apply,
}

func apply(ctx *plugin.Context, cfg Config) error {
	if err := cfg.validate(); err != nil {
		return err
	}
	// Published as read at Apply: whoever needs the file system is applied again when it changes.
	var policy struct {
		DefaultMode sandbox.Mode `json:"defaultMode"`
	}
	if _, err := ctx.Facts("policy", &policy); err != nil {
		return err
	}
	if policy.DefaultMode == "" {
		policy.DefaultMode = sandbox.ReadOnly
	}
	conn, _ := ctx.Conn("policy")
	return ctx.Provide("fs", &fsServer{
		plugin: ctx, policy: policyv1.NewPolicyClient(conn), files: &fskit.FS{MaxEditBytes: cfg.MaxEditBytes},
	}, fs.Facts{SandboxMode: policy.DefaultMode, Confines: true})
}
