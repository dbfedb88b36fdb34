package plugin

import (
	"context"
	"fmt"
	"io"
	"log"
	"log/slog"
	"strings"

	"github.com/hashicorp/go-hclog"

	rules "github.com/cordon-host/cordon/capability/journal"
)

// adoptHCLog makes hclog's default logger, from which libraries of that family derive theirs, write to l.
func adoptHCLog(l *slog.Logger) { hclog.SetDefault(hclogger{log: l}) }

// hclogger is a slog logger as hclog's users know it. Its level is the log's own; it cannot be set here.
type hclogger struct {
	log  *slog.Logger
	name string
	args []any // implied
}

func hclogLevel(l hclog.Level) slog.Level {
	switch l {
	case hclog.Trace:
		return rules.LevelTrace
	case hclog.Debug:
		return slog.LevelDebug
	case hclog.Warn:
		return slog.LevelWarn
	case hclog.Error:
		return slog.LevelError
	}
	return slog.LevelInfo
}

func (h hclogger) Log(level hclog.Level, msg string, args ...any) {
	if level == hclog.Off || !h.is(level) {
		return
	}
	l := h.log
	if h.name != "" {
		l = l.With("module", h.name)
	}
	l.Log(context.Background(), hclogLevel(level), msg, plainArgs(append(h.args[:len(h.args):len(h.args)], args...))...)
}

// plainArgs gives the values that only hclog knows a form that any logger shows.
func plainArgs(args []any) []any {
	for i, a := range args {
		switch a := a.(type) {
		case hclog.Format:
			if len(a) > 0 {
				if f, ok := a[0].(string); ok {
					args[i] = fmt.Sprintf(f, a[1:]...)
				}
			}
		case hclog.Hex:
			args[i] = fmt.Sprintf("%#x", int(a))
		case hclog.Octal:
			args[i] = fmt.Sprintf("%#o", int(a))
		case hclog.Binary:
			args[i] = fmt.Sprintf("%#b", int(a))
		}
	}
	return args
}

func (h hclogger) Trace(msg string, args ...any) { h.Log(hclog.Trace, msg, args...) }
func (h hclogger) Debug(msg string, args ...any) { h.Log(hclog.Debug, msg, args...) }
func (h hclogger) Info(msg string, args ...any)  { h.Log(hclog.Info, msg, args...) }
func (h hclogger) Warn(msg string, args ...any)  { h.Log(hclog.Warn, msg, args...) }
func (h hclogger) Error(msg string, args ...any) { h.Log(hclog.Error, msg, args...) }

func (h hclogger) is(l hclog.Level) bool { return h.log.Enabled(context.Background(), hclogLevel(l)) }

func (h hclogger) IsTrace() bool { return h.is(hclog.Trace) }
func (h hclogger) IsDebug() bool { return h.is(hclog.Debug) }
func (h hclogger) IsInfo() bool  { return h.is(hclog.Info) }
func (h hclogger) IsWarn() bool  { return h.is(hclog.Warn) }
func (h hclogger) IsError() bool { return h.is(hclog.Error) }

func (h hclogger) ImpliedArgs() []any { return h.args }
func (h hclogger) Name() string       { return h.name }

func (h hclogger) With(args ...any) hclog.Logger {
	h.args = append(h.args[:len(h.args):len(h.args)], args...)
	return h
}

func (h hclogger) Named(name string) hclog.Logger {
	if h.name != "" {
		name = h.name + "." + name
	}
	return h.ResetNamed(name)
}

func (h hclogger) ResetNamed(name string) hclog.Logger {
	h.name = name
	return h
}

func (h hclogger) SetLevel(hclog.Level) {} // the host says what it wants

func (h hclogger) GetLevel() hclog.Level {
	for _, l := range []hclog.Level{hclog.Trace, hclog.Debug, hclog.Info, hclog.Warn} {
		if h.is(l) {
			return l
		}
	}
	return hclog.Error
}

func (h hclogger) StandardLogger(o *hclog.StandardLoggerOptions) *log.Logger {
	return log.New(h.StandardWriter(o), "", 0)
}

func (h hclogger) StandardWriter(o *hclog.StandardLoggerOptions) io.Writer {
	level := hclog.Info
	if o != nil && o.ForceLevel != hclog.NoLevel {
		level = o.ForceLevel
	}
	return hclogWriter{h, level, o != nil && o.InferLevels && o.ForceLevel == hclog.NoLevel}
}

// hclogWriter makes records of lines.
type hclogWriter struct {
	log   hclogger
	level hclog.Level
	infer bool // from a level in brackets in front
}

func (w hclogWriter) Write(p []byte) (int, error) {
	text, level := strings.TrimRight(string(p), "\n"), w.level
	if name, rest, ok := strings.Cut(strings.TrimPrefix(text, "["), "]"); w.infer && ok && strings.HasPrefix(text, "[") {
		if name == "ERR" {
			name = "ERROR"
		}
		if l := hclog.LevelFromString(name); l != hclog.NoLevel {
			level, text = l, strings.TrimSpace(rest)
		}
	}
	w.log.Log(level, text)
	return len(p), nil
}

// Interface guard.
var _ hclog.Logger = hclogger{}
