package command

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/kvhost/kvhost/host/internal/config"
	"github.com/kvhost/kvhost/host/internal/policyset"
	"github.com/kvhost/kvhost/host/internal/proto"
)

// running finds the host for commands that talk to a running one.
type running struct {
	socket, file string
	// looks means that the command changes nothing. If no socket is named, it may then use the only running host of this user.
	looks bool
}

func (r *running) addTo(cmd *cobra.Command) {
	usage := "the host's socket (default: the configuration's)"
	if r.looks {
		usage = "the host's socket (default: the configuration's, else that of the only host which this user may ask)"
	}
	cmd.Flags().StringVar(&r.socket, "socket", "", usage)
	cmd.Flags().StringVarP(&r.file, "config", "c", "",
		"TOML file that names the socket (default: $"+config.EnvFile+", else none)")
}

// dial returns a connection to the host's socket. The socket need not exist yet.
func (r *running) dial() (conn *grpc.ClientConn, path string, err error) {
	socket := r.socket
	if socket == "" {
		s := settings{file: r.file}
		loaded, err := s.load()
		if err != nil {
			return nil, "", err
		}
		socket = loaded.Config.Socket
		if _, named := loaded.Origins["socket"]; r.looks && !named && !answers(socket) {
			switch found := hostsHere(); len(found) {
			case 0:
			case 1:
				socket = found[0]
				fmt.Fprintf(os.Stderr, "kvhost: no host at %s; this is the one at %s\n", loaded.Config.Socket, socket)
			default:
				return nil, "", fmt.Errorf("%s: no host is running there, and several elsewhere: want --socket, one of %s", loaded.Config.Socket,
					strings.Join(found, ", "))
			}
		}
	}
	if path, err = filepath.Abs(socket); err != nil {
		return nil, "", err
	}
	conn, err = grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	return conn, path, err
}

// hostsHere returns the sockets of hosts that answer this user. It finds sockets in this network namespace. It also finds those of
// services, and of hosts that engines have started, which may be in another one.
func hostsHere() (found []string) {
	text, _ := os.ReadFile("/proc/net/unix")
	found = slices.DeleteFunc(listening(string(text)), func(path string) bool { return !answers(path) })
	patterns := []string{"/run/kvhost*/kvhost.sock"}
	home, _ := os.UserHomeDir() // engines have their sockets there if another user has taken the usual directory
	for _, run := range []string{cmp.Or(os.Getenv("XDG_RUNTIME_DIR"), "/tmp"), filepath.Join(home, ".cache")} {
		dir := filepath.Join(run, fmt.Sprintf("kvhost-%d", os.Geteuid()))
		if info, err := os.Lstat(dir); err == nil && info.Sys().(*syscall.Stat_t).Uid == uint32(os.Geteuid()) {
			patterns = append(patterns, filepath.Join(dir, "*.sock"))
		}
	}
	for _, pattern := range patterns {
		list, _ := filepath.Glob(pattern) // a bracket in a directory's name can make the pattern invalid
		found = append(found, slices.DeleteFunc(list, func(path string) bool { return !answers(path) })...)
	}
	slices.Sort(found)
	return slices.Compact(found)
}

// listening returns the sockets of hosts in the kernel's table. The socket of a host is recognised by a second one for
// descriptors, with the suffix .fd.
func listening(table string) (found []string) {
	const accepts = "00010000"
	have := map[string]bool{}
	for line := range strings.Lines(table) {
		head, path, absolute := strings.Cut(strings.TrimSuffix(line, "\n"), " /")
		if f := strings.Fields(head); absolute && len(f) == 7 && f[3] == accepts {
			have["/"+path] = true
		}
	}
	for path := range have {
		if have[path+".fd"] {
			found = append(found, path)
		}
	}
	return found
}

func answers(socket string) bool {
	c, err := net.DialTimeout("unix", socket, time.Second)
	if err == nil {
		c.Close()
	}
	return err == nil
}

// ask makes one call of a service.
func ask[C, Q, A any](ctx context.Context, r *running, service func(grpc.ClientConnInterface) C,
	call func(C, context.Context, *Q, ...grpc.CallOption) (*A, error), q *Q) (*A, error) {
	c, path, err := r.dial()
	if err != nil {
		return nil, err
	}
	defer c.Close()
	a, err := call(service(c), ctx, q)
	if err == nil {
		return a, nil
	}
	switch code, err := status.Code(err), proto.Plain(path, err); code {
	case codes.FailedPrecondition:
		return nil, refusedBy{err, policyset.ErrPolicy}
	case codes.InvalidArgument:
		return nil, refusedBy{err, config.ErrValue}
	default:
		return nil, err
	}
}

// refusedBy is a refusal by a running host. Its exit code is the same as for a start that is refused for this reason.
type refusedBy struct {
	error
	cause error
}

func (e refusedBy) Is(target error) bool { return target == e.cause }

func (r *running) status(ctx context.Context) (*proto.StatusResponse, error) {
	return ask(ctx, r, proto.NewStatusServiceClient, proto.StatusServiceClient.Status, &proto.StatusRequest{})
}
