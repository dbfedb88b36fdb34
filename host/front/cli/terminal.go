package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// maxAnswer is the longest line a person is read, in bytes; what a terminal delivers at most.
const maxAnswer = 4096

// lines reads what a person types, a line at a time, and only while somebody waits for one.
type lines struct {
	file *os.File
	rest []byte // read beyond the last line
}

// next waits for a line, without its end. The error is io.EOF at the end of the input, or why ctx ended; nothing that is
// typed later is lost to it.
func (l *lines) next(ctx context.Context) (string, error) {
	wake, woken, err := os.Pipe()
	if err != nil {
		return "", err
	}
	defer wake.Close()
	defer woken.Close()
	defer context.AfterFunc(ctx, func() { _ = woken.Close() })() // the end of the pipe is the wake-up
	buf := make([]byte, maxAnswer)
	for {
		if i := bytes.IndexByte(l.rest, '\n'); i >= 0 {
			line := string(bytes.TrimSuffix(l.rest[:i], []byte("\r")))
			l.rest = l.rest[i+1:]
			return line, nil
		}
		if len(l.rest) > maxAnswer {
			return "", fmt.Errorf("a line of more than %d bytes", maxAnswer)
		}
		fds := []unix.PollFd{
			{Fd: int32(l.file.Fd()), Events: unix.POLLIN},
			{Fd: int32(wake.Fd()), Events: unix.POLLIN},
		}
		if _, err := unix.Poll(fds, -1); err != nil {
			if errors.Is(err, unix.EINTR) {
				continue
			}
			return "", err
		}
		if ctx.Err() != nil {
			return "", context.Cause(ctx)
		}
		n, err := l.file.Read(buf)
		l.rest = append(l.rest, buf[:n]...)
		switch {
		case n > 0:
		case err == nil || errors.Is(err, io.EOF):
			if len(l.rest) == 0 {
				return "", io.EOF
			}
			line := string(l.rest)
			l.rest = nil
			return line, nil
		default:
			return "", err
		}
	}
}

// discard throws away what was typed before now, so that nothing meant for something else answers a question.
func (l *lines) discard() {
	l.rest = nil
	// Only a terminal has such a queue; on anything else this fails and there is nothing to do.
	_ = unix.IoctlSetInt(int(l.file.Fd()), unix.TCFLSH, unix.TCIFLUSH)
}
