package command

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/kvhost/kvhost/host/internal/proto"
)

func newStatus() *cobra.Command {
	r := running{looks: true}
	var asJSON bool
	var every time.Duration
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show what a running host does",
		Long: `Shows a running host on one screen: whether it is ready and why not, hits, roots, policies, routes,
latencies and sessions. The command measures the rates for one second. With --watch it draws the screen again each second until
Ctrl-C. With --json it prints the same document as GET /status, at once.`,
		Example: `  kvhost status --socket /run/kvhost/kvhost.sock
  kvhost status --watch
  kvhost status --json | jq '.roots[] | {path, state, used}'`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cmd.Flags().Changed("watch") {
				return watch(cmd.Context(), &r, every)
			}
			before, err := r.status(cmd.Context())
			if err != nil {
				return err
			}
			if asJSON {
				return printStatus(cmd.OutOrStdout(), before)
			}
			select {
			case <-time.After(time.Second):
			case <-cmd.Context().Done():
				return cmd.Context().Err()
			}
			now, err := r.status(cmd.Context())
			if err != nil {
				return err
			}
			for line := range strings.Lines(drawScreen(before, now)) {
				line, out := strings.TrimSuffix(line, "\n"), cmd.OutOrStdout()
				if term.IsTerminal(int(os.Stdout.Fd())) {
					line, out = paint(line), os.Stdout // standard output interprets the colour; the safe writer would escape it
				}
				if _, err := fmt.Fprintln(out, line); err != nil {
					return err
				}
			}
			return nil
		},
	}
	r.addTo(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	cmd.Flags().DurationVar(&every, "watch", 0, "draw the screen again and again, at this interval (1s if none is given)")
	cmd.Flags().Lookup("watch").NoOptDefVal = "1s"
	return cmd
}

func printStatus(w io.Writer, st *proto.StatusResponse) error {
	b, err := proto.JSON(st)
	if err == nil {
		_, err = fmt.Fprintf(w, "%s\n", b)
	}
	return err
}

// printPart prints some fields of the status as a document of their own.
func printPart(w io.Writer, st *proto.StatusResponse, fields ...string) error {
	b, err := proto.JSON(st)
	if err != nil {
		return err
	}
	var all map[string]json.RawMessage
	if err := json.Unmarshal(b, &all); err != nil {
		return err
	}
	maps.DeleteFunc(all, func(name string, _ json.RawMessage) bool { return !slices.Contains(fields, name) })
	return json.NewEncoder(w).Encode(all)
}
