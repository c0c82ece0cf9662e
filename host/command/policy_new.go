package command

import (
	"fmt"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
)

func newPolicyNew() *cobra.Command {
	var language, role string
	cmd := &cobra.Command{
		Use:   "new DIR",
		Short: "Create a project for a new policy, named like its directory",
		Long: `Creates a project that builds and passes kvhost policy check: a small policy, its manifest, a
Makefile and a copy of the kit for its language.`,
		Example: "  kvhost policy new --lang rust --role place mine && make -C mine check",
		Args:    wantArgs(1, "one directory"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := newProject(args[0], language, role); err != nil {
				return err
			}
			fmt.Fprintf(cmd.OutOrStdout(), "%s: make -C %s check\n", filepath.Clean(args[0]), filepath.Clean(args[0]))
			return nil
		},
	}
	cmd.Flags().StringVar(&role, "role", "evict", "role: evict, admit, place or layout")
	cmd.Flags().StringVar(&language, "lang", "go", "language: "+strings.Join(policyLanguages, ", "))
	return cmd
}
