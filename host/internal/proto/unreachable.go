package proto

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// ErrVersion means that a host speaks another version of the protocol.
var ErrVersion = errors.New("the host is of another version than this program: replace the older one")

// Plain converts the error of a call to the host at a socket to a message for users: the host's own text for a refusal, and
// otherwise the reason why there was no answer. gRPC's text would name details of its transport.
func Plain(socket string, err error) error {
	s, ok := status.FromError(err)
	if !ok || err == nil {
		return err
	}
	switch s.Code() {
	case codes.Unavailable:
	case codes.Unimplemented:
		return fmt.Errorf("%s: %w: %s", socket, ErrVersion, s.Message())
	default:
		return errors.New(s.Message())
	}
	c, err := net.DialTimeout("unix", socket, time.Second)
	switch {
	case err == nil:
		c.Close()
		return fmt.Errorf("%s: the host closed the connection: it is ending, or does not let user %d in, which socket_users or "+
			"socket_groups in its configuration would", socket, os.Geteuid())
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%s: no host is running there: there is no such socket", socket)
	case errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("%s: no host is running there: the socket is left of one that has ended", socket)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%s: permission denied: the socket, or a directory above it, refuses user %d; be root or the host's user, "+
			"or be let in by socket_users or socket_groups in its configuration", socket, os.Geteuid())
	}
	return err
}
