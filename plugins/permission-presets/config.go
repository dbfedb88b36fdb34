package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/invopop/jsonschema"

	"github.com/cordon-host/cordon/capability/approval"
	"github.com/cordon-host/cordon/capability/permission"
	"github.com/cordon-host/cordon/capability/sandbox"
)

// Config is the row's config.
type Config struct {
	Presets       Presets `json:"presets,omitempty" jsonschema_description:"The presets by name, in the order they are shown. They replace the shipped ones."`
	DefaultPreset string  `json:"defaultPreset,omitempty" jsonschema_description:"The preset of new sessions; without it, the first one that says what the policy and approval rows have as their defaults."`
}

// Presets is a table as a config has it: a mapping from names to pairs, whose order counts.
type Presets permission.Table

// pair is one value of the mapping.
type pair struct {
	Sandbox     sandbox.Mode    `json:"sandbox"`
	Approval    approval.Policy `json:"approval"`
	Description string          `json:"description"`
}

func defaults() Config {
	return Config{Presets: Presets{
		{
			Name: "read-only", Pair: permission.Pair{Mode: sandbox.ReadOnly, Policy: approval.Ask},
			Description: "No file can be modified. A wider mode is asked for, one operation at a time.",
		},
		{
			Name: "workspace-write", Pair: permission.Pair{Mode: sandbox.WorkspaceWrite, Policy: approval.Ask},
			Description: "Files below the session's workspace can be modified. A wider mode is asked for, one operation at a time.",
		},
		{
			Name: "danger-full-access", Pair: permission.Pair{Mode: sandbox.DangerFullAccess, Policy: approval.Never},
			Description: "Every file of this user can be modified: there is no sandbox, and nothing is asked.",
		},
	}}
}

// UnmarshalJSON reads the mapping in its own order. It replaces what was there before.
func (p *Presets) UnmarshalJSON(text []byte) error {
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	open, err := dec.Token()
	if err != nil {
		return err
	}
	if open != json.Delim('{') {
		return errors.New("presets: a mapping from names to {sandbox, approval, description} was expected")
	}
	table := Presets{}
	for dec.More() {
		name, err := dec.Token()
		if err != nil {
			return err
		}
		var value pair
		if err := dec.Decode(&value); err != nil {
			return fmt.Errorf("presets: %v: %w", name, err)
		}
		table = append(table, permission.Preset{
			Name: name.(string), // a key always is one
			Pair: permission.Pair{Mode: value.Sandbox, Policy: value.Approval}, Description: value.Description,
		})
	}
	*p = table
	return nil
}

// JSONSchema is the schema of the mapping.
func (Presets) JSONSchema() *jsonschema.Schema {
	var modes []any
	for _, m := range sandbox.Modes() {
		modes = append(modes, m)
	}
	properties := jsonschema.NewProperties()
	properties.Set("sandbox", &jsonschema.Schema{Type: "string", Enum: modes})
	properties.Set("approval", &jsonschema.Schema{Type: "string", Enum: []any{approval.Ask, approval.Never}})
	properties.Set("description", &jsonschema.Schema{Type: "string", Description: "What a person reads beside the name."})
	return &jsonschema.Schema{Type: "object", AdditionalProperties: &jsonschema.Schema{
		Type: "object", Properties: properties, Required: []string{"sandbox", "approval"}, AdditionalProperties: jsonschema.FalseSchema,
	}}
}
