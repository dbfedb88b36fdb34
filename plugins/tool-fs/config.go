package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	approvalv1 "github.com/cordon-host/cordon/api/approval/v1"
	fsv1 "github.com/cordon-host/cordon/api/fs/v1"
	policyv1 "github.com/cordon-host/cordon/api/policy/v1"
	toolsv1 "github.com/cordon-host/cordon/api/tools/v1"
	"github.com/cordon-host/cordon/capability/fs"
	"github.com/cordon-host/cordon/plugin"
)

// Config is the row's config. The defaults are the reference system's.
type Config struct {
	ReadLimit         int64 `json:"readLimit,omitempty" jsonschema:"default=2000" jsonschema_description:"How many lines one read returns at most, and without a limit of its own."`
	ReadMaxLineLength int64 `json:"readMaxLineLength,omitempty" jsonschema:"default=2000" jsonschema_description:"Longest line that is shown whole, in characters."`
	ReadMaxBytes      int64 `json:"readMaxBytes,omitempty" jsonschema:"default=51200" jsonschema_description:"How much text one read returns at most, in bytes."`
}

func defaults() Config {
	return Config{ReadLimit: 2000, ReadMaxLineLength: 2000, ReadMaxBytes: 50 << 10}
}

func (c Config) validate() error {
	for _, f := range []struct {
		name  string
		value int64
	}{{"readLimit", c.ReadLimit}, {"readMaxLineLength", c.ReadMaxLineLength}, {"readMaxBytes", c.ReadMaxBytes}} {
		if f.value <= 0 {
			return fmt.Errorf("tool-fs: %s must be a positive integer", f.name)
		}
	}
	return nil
}

// Plugin is the plugin.
var Plugin = plugin.Plugin[Config]{
	Name: "tool-fs", Version: "0.1.0",
	Needs: []plugin.Need{
		{Capability: "fs", Desc: &fsv1.Fs_ServiceDesc},
		{Capability: "policy", Desc: &policyv1.Policy_ServiceDesc, Optional: true},
		{Capability: "approval", Desc: &approvalv1.Approval_ServiceDesc, Optional: true},
	},
	Tools: []string{toolRead, toolWrite, toolEdit},
	Contexts: []plugin.Contribution{
		{Name: "tool:read", Order: 100}, {Name: "tool:write", Order: 101}, {Name: "tool:edit", Order: 102},
	},
	Default: defaults,
	Apply:   apply,
}

func apply(ctx *plugin.Context, cfg Config) error {
	if err := cfg.validate(); err != nil {
		return err
	}
	var facts fs.Facts
	if _, err := ctx.Facts("fs", &facts); err != nil {
		return err
	}
	conn, _ := ctx.Conn("fs")
	f := &files{fs: fsv1.NewFsClient(conn), confines: facts.Confines, cfg: cfg}
	if conn, ok := ctx.Conn("policy"); ok {
		f.policy = policyv1.NewPolicyClient(conn)
	}
	if conn, ok := ctx.Conn("approval"); ok {
		f.approval = approvalv1.NewApprovalClient(conn)
	}
	if f.confines && f.policy == nil {
		return errors.New("tool-fs: the mounted filesystem confines but the policy capability is missing")
	}
	for _, t := range []struct {
		name, section, text string
		call                func(context.Context, json.RawMessage) (*toolsv1.CallReply, error)
	}{
		{toolRead, "tool:read", readHabit, f.read},
		{toolWrite, "tool:write", writeHabit, f.write},
		{toolEdit, "tool:edit", editHabit, f.edit},
	} {
		schema, err := inputSchema(t.name, cfg, f.confines)
		if err != nil {
			return err
		}
		err = ctx.Tool(plugin.Tool{Name: t.name, Description: description(t.name, f.confines), InputSchema: schema, Call: t.call})
		if err != nil {
			return err
		}
		if err := ctx.Contribute(t.section, func(context.Context) (string, error) { return t.text, nil }); err != nil {
			return err
		}
	}
	return nil
}
