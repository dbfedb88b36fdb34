package process_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cordon-host/cordon/host/process"
)

// privately copies the executable of a spec, so that it can be harmed.
func privately(t *testing.T, s *process.Spec) []byte {
	t.Helper()
	data, err := os.ReadFile(s.Path)
	if err != nil {
		t.Fatal(err)
	}
	s.Path = filepath.Join(t.TempDir(), "plugin")
	if err := os.WriteFile(s.Path, data, 0o700); err != nil {
		t.Fatal(err)
	}
	return data
}

// TestReplacedAfterTheCheck replaces the file between the check and the execution: what runs is what was checked.
func TestReplacedAfterTheCheck(t *testing.T) {
	for _, how := range []struct {
		name    string
		replace func(path string) error
	}{
		{"renamed over", func(path string) error {
			evil := path + "-evil"
			if err := os.WriteFile(evil, []byte("#!/bin/sh\nexit 66\n"), 0o700); err != nil {
				return err
			}
			return os.Rename(evil, path)
		}},
		{"removed", os.Remove},
		{"link to another", func(path string) error {
			return errors.Join(os.Remove(path), os.Symlink("/bin/false", path))
		}},
	} {
		for _, unconfined := range []bool{false, true} {
			s, _ := spec(t, "")
			s.Unconfined = unconfined
			privately(t, &s)
			hooked := 0
			process.BeforeExec(func(path string) {
				hooked++
				if err := how.replace(path); err != nil {
					t.Error(err)
				}
			})
			g := start(t, s)
			process.BeforeExec(func(string) {})
			running, err := os.ReadFile("/proc/" + itoa(g.PID()) + "/exe")
			if err != nil {
				t.Fatal(err)
			}
			sum := sha256.Sum256(running)
			if hooked != 1 || hex.EncodeToString(sum[:]) != s.Digest {
				t.Errorf("%s, unconfined %v: other bytes run than were checked", how.name, unconfined)
			}
			if now, err := os.ReadFile(s.Path); err == nil && bytes.Equal(now, running) {
				t.Errorf("%s: the control: nothing was replaced", how.name)
			}
		}
	}
}

// TestFlippedByteIsNotStarted: one byte of the executable differs, and nothing runs.
func TestFlippedByteIsNotStarted(t *testing.T) {
	s, _ := spec(t, "print")
	data := privately(t, &s)
	start(t, s) // the control
	flipped := bytes.Clone(data)
	flipped[len(flipped)/2] ^= 1
	if err := os.Remove(s.Path); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(s.Path, flipped, 0o700); err != nil {
		t.Fatal(err)
	}
	g, err := process.Start(t.Context(), s)
	var failed *process.StartError
	if g != nil || !errors.As(err, &failed) {
		t.Fatalf("started: %v", err)
	}
	sum := sha256.Sum256(flipped)
	for _, want := range []string{s.Digest, hex.EncodeToString(sum[:]), s.Path} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("the error does not name %s: %v", want, err)
		}
	}
	if failed.Exit != "" {
		t.Errorf("a process ran: %s", failed.Exit)
	}
}

// secrets are variables that people have, some of which look like ones that programs need.
var secrets = map[string]string{
	"DB_PASSWORD": "s1", "AWS_SECRET_ACCESS_KEY": "s2", "SSL_KEY_PASSWORD": "s3", "SSL_CLIENT_KEY": "s4", "LC_SECRET": "s5", "LC_": "s6",
	"HTTPS_PROXY": "http://u:s7@proxy", "HOMEBREW_TOKEN": "s8", "PATH_TOKEN": "s9", "LANG_KEY": "s10", "USERPASS": "s11", "SSH_AUTH_SOCK": "s12",
	"GOFLAGS": "s13", "LD_PRELOAD_TOKEN": "s14", "TZ_KEY": "s15", "CORDON_TOKEN": "s16", "PLUGIN_TOKEN": "s17",
}

// TestEnvironmentOfAProcess: a plugin that writes its whole environment down has none of the host's secrets.
func TestEnvironmentOfAProcess(t *testing.T) {
	for name, value := range secrets {
		t.Setenv(name, "secret-"+value)
	}
	t.Setenv("SSL_CERT_FILE", "/etc/ssl/cert.pem")
	s, _ := spec(t, "environ")
	s.Env = append(s.Env, "ROW_TOKEN=for this plugin")
	start(t, s)
	text, err := os.ReadFile(filepath.Join(s.RunDir, "file"))
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for kv := range strings.SplitSeq(string(text), "\x00") {
		if name, value, ok := strings.Cut(kv, "="); ok {
			got[name] = value
		}
	}
	for name, value := range got {
		if strings.Contains(value, "secret-") {
			t.Errorf("%s reached the plugin", name)
		}
		// Beside the list there are the row's own and go-plugin's.
		own := slices.Contains([]string{"ROW_TOKEN", "CORDON_TEST_PLUGIN", "CORDON_TEST_FILE", "CORDON_PLUGIN"}, name) || strings.HasPrefix(name, "PLUGIN_")
		if !own && !slices.Contains(process.Inherited, name) {
			t.Errorf("%s reached the plugin and is on no list", name)
		}
	}
	// The controls.
	for name, want := range map[string]string{"PATH": os.Getenv("PATH"), "SSL_CERT_FILE": "/etc/ssl/cert.pem", "ROW_TOKEN": "for this plugin"} {
		if got[name] != want {
			t.Errorf("%s is %q, want %q", name, got[name], want)
		}
	}
}
