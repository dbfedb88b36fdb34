package host

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	controlv1 "github.com/cordon-host/cordon/api/control/v1"
	"github.com/cordon-host/cordon/capability/fault"
	"github.com/cordon-host/cordon/capability/journal"
	"github.com/cordon-host/cordon/host/logs"
)

// logged holds that there is a log of an entry; every log has an empty name.
func (s controlServer) logged(entry string) error {
	if _, ok := s.h.entry(entry); ok || entry == "" || s.h.logs.Known(entry) {
		return nil
	}
	return fault.New(codes.NotFound, "NO_ENTRY", "entry %q is not in the composition; see `cordon status`", entry)
}

// Logs streams what is kept of entries' logs.
func (s controlServer) Logs(r *controlv1.LogsRequest, stream grpc.ServerStreamingServer[controlv1.LogLine]) error {
	if err := s.logged(r.GetEntry()); err != nil {
		return err
	}
	q := logs.Query{Entry: r.GetEntry(), Level: journal.LevelTrace, Tail: int(r.GetTail()), Follow: r.GetFollow()}
	if r.GetLevel() != "" {
		var err error
		if q.Level, err = journal.ParseLevel(r.GetLevel()); err != nil {
			return fault.New(codes.InvalidArgument, "BAD_LEVEL", "%v", err)
		}
	}
	ctx, end := s.watching(stream.Context())
	defer end()
	return s.h.logs.Read(ctx, q, func(r logs.Record) error {
		return stream.Send(&controlv1.LogLine{
			TimeMs: r.Time.UnixMilli(), Level: journal.LevelName(r.Level), Entry: r.Entry, Generation: r.Generation, Stream: r.Stream,
			Message: r.Message, Attributes: r.Attributes, Dropped: r.Dropped, Truncated: r.Truncated,
		})
	})
}

// SetLogLevel changes what entries log, from now on.
func (s controlServer) SetLogLevel(_ context.Context, r *controlv1.SetLogLevelRequest) (*controlv1.SetLogLevelReply, error) {
	if err := s.logged(r.GetEntry()); err != nil {
		return nil, err
	}
	l, err := journal.ParseLevel(r.GetLevel())
	if err != nil {
		return nil, fault.New(codes.InvalidArgument, "BAD_LEVEL", "%v", err)
	}
	s.h.logs.SetLevel(r.GetEntry(), l)
	return &controlv1.SetLogLevelReply{}, nil
}
