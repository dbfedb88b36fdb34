//go:build !linux

package process

import "errors"

func confine(string, string, string) error {
	return errors.New("plugin confinement: this system has none; grant the row unconfined: true to run its plugin all the same")
}

// Confinable says what this system cannot do of the confinement of plugins.
func Confinable() string { return "plugins cannot be confined on this system" }
