package fusefs

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/host/internal/testkit/faultfs"
)

// processName is the first argument of a server's process. No user starts a program by this name.
const processName = "fusefs: serve"

func init() {
	if len(os.Args) == 3 && os.Args[0] == processName {
		if err := serve(os.Args[1], os.Args[2]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(3)
		}
		os.Exit(0)
	}
}

// serve mounts, and does what standard input says until it ends.
func serve(under, dir string) error {
	rules := faultfs.New(nil)
	var st syscall.Stat_t
	if err := syscall.Stat(under, &st); err != nil {
		return fmt.Errorf("%s: %w", under, err)
	}
	root := &fs.LoopbackRoot{Path: under, Dev: uint64(st.Dev)}
	top := &node{LoopbackNode: fs.LoopbackNode{RootData: root}, rules: rules}
	root.RootNode = top
	// The kernel asks for each directory of a path again where it may not remember names for a while, as it does those of NFS.
	names := time.Second
	server, err := fs.Mount(dir, top, &fs.Options{
		EntryTimeout: &names,
		MountOptions: fuse.MountOptions{FsName: "kvhost-test", Name: "faults", DirectMountStrict: true},
	})
	if err != nil {
		return fmt.Errorf("mount %s: %w", dir, err)
	}
	fmt.Println("ok")
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		verb, text, _ := strings.Cut(in.Text(), " ")
		switch verb {
		case "set":
			list, err := faultfs.ParseRules(strings.ReplaceAll(text, "\x00", "\n"))
			if err != nil {
				fmt.Println(err)
				continue
			}
			rules.Set(list...)
			fmt.Println("ok")
		case "injected":
			fmt.Println("ok", rules.Injected())
		}
	}
	rules.Set() // releases what hangs
	if err := server.Unmount(); err != nil {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("unmount %s: %w", dir, err)
		}
	}
	return nil
}
