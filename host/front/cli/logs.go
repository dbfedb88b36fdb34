package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	controlv1 "github.com/cordon-host/cordon/api/control/v1"
	"github.com/cordon-host/cordon/capability/journal"
	"github.com/cordon-host/cordon/host/front/cli/printable"
)

func (a *app) logsCommand() *cobra.Command {
	var follow bool
	var tail int64
	var level, set string
	cmd := &cobra.Command{
		Use:   "logs [ENTRY]",
		Short: "print what the plugins of the running host logged",
		Long: `Print the last log records of an entry, or of all: what its plugin logged,
what its process printed, and what the host has to say about it. The host
keeps a bounded number of them, and only while it runs.

--set-level changes the level of the entry, or of all entries, until the host
ends, and prints nothing: plugins do not send what is below it.

With --json each line is an object with "time" (milliseconds since 1970),
"level", "entry", "generation", "stream" (log: the plugin's logger; stdout,
stderr: its process; host: the host, about it), "message", "attributes" (an
object), "dropped" (how many records before it are missing) and "truncated".`,
		Example: "  cordon logs bash --tail 20",
		Args:    between(0, "ENTRY"),
		RunE: func(cmd *cobra.Command, args []string) error {
			entry := ""
			if len(args) > 0 {
				entry = args[0]
			}
			for flag, value := range map[string]string{"level": level, "set-level": set} {
				if value == "" && !cmd.Flags().Changed(flag) {
					continue
				}
				if _, err := journal.ParseLevel(value); err != nil {
					return usagef("--%s: %w", flag, err)
				}
			}
			if tail < -1 {
				return usagef("--tail must be a number of records, got %d", tail)
			}
			if set != "" {
				if follow || level != "" || cmd.Flags().Changed("tail") {
					return usagef("--set-level prints no records: it goes with no other flag of this command")
				}
				return a.setLogLevel(cmd.Context(), entry, set)
			}
			return a.logs(cmd.Context(), &controlv1.LogsRequest{Entry: entry, Follow: follow, Tail: tail, Level: level})
		},
	}
	cmd.Flags().BoolVar(&follow, "follow", false, "wait for more records, until interrupted")
	cmd.Flags().Int64Var(&tail, "tail", -1, "the newest `N` records only (default: all that are kept)")
	cmd.Flags().StringVar(&level, "level", "", "this `level` and above: trace, debug, info, warn or error")
	cmd.Flags().StringVar(&set, "set-level", "", "have the entry, or all, log from this `level` on")
	cmd.Flags().Lookup("tail").DefValue = "0" // said in words
	return cmd
}

func (a *app) setLogLevel(ctx context.Context, entry, level string) (err error) {
	h, err := a.running(ctx, "")
	if err != nil {
		return err
	}
	defer a.detach(h, &err)
	_, err = h.SetLogLevel(ctx, &controlv1.SetLogLevelRequest{Entry: entry, Level: level})
	return err
}

func (a *app) logs(ctx context.Context, r *controlv1.LogsRequest) (err error) {
	h, err := a.running(ctx, "")
	if err != nil {
		return err
	}
	defer a.detach(h, &err)
	stream, err := h.Logs(ctx, r)
	if err != nil {
		return err
	}
	for {
		line, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			err = a.printLog(line)
		}
		if err != nil {
			return err
		}
	}
}

func (a *app) printLog(r *controlv1.LogLine) error {
	if a.json {
		return a.printJSON(struct {
			Time       int64           `json:"time"`
			Level      string          `json:"level"`
			Entry      string          `json:"entry"`
			Generation uint64          `json:"generation"`
			Stream     string          `json:"stream"`
			Message    string          `json:"message"`
			Attributes json.RawMessage `json:"attributes,omitempty"`
			Dropped    uint64          `json:"dropped,omitempty"`
			Truncated  bool            `json:"truncated,omitempty"`
		}{
			r.GetTimeMs(), r.GetLevel(), r.GetEntry(), r.GetGeneration(), r.GetStream(), r.GetMessage(), r.GetAttributes(),
			r.GetDropped(), r.GetTruncated(),
		})
	}
	if r.GetDropped() > 0 {
		if err := a.print("%s  -      %s: %d records are missing here\n", clock(r.GetTimeMs()), r.GetEntry(), r.GetDropped()); err != nil {
			return err
		}
	}
	who := r.GetEntry()
	if r.GetGeneration() > 0 {
		who = fmt.Sprintf("%s@%d", who, r.GetGeneration())
	}
	short, long := attributes(r.GetAttributes())
	text := strings.TrimRight(r.GetMessage(), "\n") + short
	if r.GetTruncated() {
		text += " [cut]"
	}
	text += long
	// A record that goes on is indented, so that none can look like another.
	text = strings.ReplaceAll(text, "\n", "\n    ")
	return a.print("%s  %-5s  %s %s: %s\n", clock(r.GetTimeMs()), r.GetLevel(), who, r.GetStream(), text)
}

// attributes are a record's attributes for people: on its line, and texts of several lines below it.
func attributes(raw []byte) (short, long string) {
	if len(raw) == 0 {
		return "", ""
	}
	keys, values, err := fields(raw)
	if err != nil {
		return " " + string(raw), ""
	}
	for i, key := range keys {
		var text string
		switch isText := json.Unmarshal(values[i], &text) == nil; {
		case isText && strings.Contains(text, "\n"):
			long += "\n" + key + ":\n" + strings.TrimRight(text, "\n")
		case isText && plain(text):
			short += " " + key + "=" + text
		default:
			short += " " + key + "=" + string(values[i])
		}
	}
	return short, long
}

// plain reports whether a text needs no quotes to be told from what stands beside it.
func plain(text string) bool {
	return text != "" && !strings.ContainsAny(text, " \t\"=") && printable.Line(text) == text
}

// fields are the fields of a JSON object in their order.
func fields(raw []byte) (keys []string, values []json.RawMessage, err error) {
	dec := json.NewDecoder(strings.NewReader(string(raw)))
	if _, err := dec.Token(); err != nil {
		return nil, nil, err
	}
	for dec.More() {
		key, err := dec.Token()
		if err != nil {
			return nil, nil, err
		}
		var value json.RawMessage
		if err := dec.Decode(&value); err != nil {
			return nil, nil, err
		}
		name, _ := key.(string) // an object has no other keys
		keys, values = append(keys, name), append(values, value)
	}
	return keys, values, nil
}
