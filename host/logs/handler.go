package logs

import (
	"context"
	"log/slog"

	"github.com/cordon-host/cordon/capability/journal"
)

// Handler is for the host's own log. All of it goes on; what names an entry is kept with that entry's records.
func (b *Book) Handler() slog.Handler { return handler{book: b, next: b.next} }

type handler struct {
	book       *Book
	next       slog.Handler
	scope      journal.Scope
	entry      string
	generation uint64
}

func (h handler) Enabled(ctx context.Context, l slog.Level) bool {
	return h.next.Enabled(ctx, l) || int64(l) >= h.book.lowest.Load()
}

func (h handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	h.next = h.next.WithAttrs(attrs)
	if !h.scope.Grouped() {
		attrs = h.identify(attrs)
	}
	h.scope = h.scope.Attrs(attrs)
	return h
}

func (h handler) WithGroup(name string) slog.Handler {
	h.next, h.scope = h.next.WithGroup(name), h.scope.Group(name)
	return h
}

// identify takes entry and generation out of attributes.
func (h *handler) identify(attrs []slog.Attr) []slog.Attr {
	var rest []slog.Attr
	for _, a := range attrs {
		switch {
		case a.Key == "entry" && a.Value.Kind() == slog.KindString:
			h.entry = a.Value.String()
		case a.Key == "generation" && a.Value.Kind() == slog.KindUint64:
			h.generation = a.Value.Uint64()
		default:
			rest = append(rest, a)
		}
	}
	return rest
}

func (h handler) Handle(ctx context.Context, r slog.Record) error {
	own := r
	if !h.scope.Grouped() {
		var attrs []slog.Attr
		r.Attrs(func(a slog.Attr) bool { attrs = append(attrs, a); return true })
		own = slog.NewRecord(r.Time, r.Level, r.Message, 0)
		own.AddAttrs(h.identify(attrs)...)
	}
	if h.entry != "" {
		message, attributes, cut := journal.Cut(r.Message, h.scope.JSON(own))
		h.book.keep(Record{
			Time: r.Time, Level: r.Level, Entry: h.entry, Generation: h.generation, Stream: StreamHost,
			Message: message, Attributes: attributes, Truncated: cut,
		})
	}
	if !h.next.Enabled(ctx, r.Level) {
		return nil
	}
	return h.next.Handle(ctx, r)
}

// Interface guard.
var _ slog.Handler = handler{}
