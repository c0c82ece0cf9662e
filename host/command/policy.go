package command

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/regular"
	"github.com/kvhost/kvhost/plugins/dist"
)

func newPolicy() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "policy",
		Short: "Write, check, pack and run policies",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return usageError{fmt.Errorf("%s: want a subcommand", cmd.CommandPath())}
		},
	}
	cmd.AddCommand(newPolicyInspect(), newPolicyCheck(), newPolicyStep(), newPolicyNew(), newPolicyPack(), newPolicyDigest())
	cmd.AddCommand(newPolicyList(), newPolicySwap(), newPolicyPromote())
	return cmd
}

var wantFiles = wantArgs(1, math.MaxInt, "a .wasm file")

func newPolicyDigest() *cobra.Command {
	return &cobra.Command{
		Use:     "digest FILE...",
		Short:   "Print the SHA-256 that pins a module in the configuration",
		Example: "  kvhost policy digest mine.wasm >> kvhost.toml",
		Args:    wantFiles,
		RunE: func(cmd *cobra.Command, args []string) error {
			for _, path := range args {
				module, err := regular.ReadFile(cmd.Context(), path, sandbox.MaxModuleBytes)
				if errors.Is(err, fs.ErrNotExist) && filepath.Base(path) == path {
					module, err = dist.Read(path)
				}
				if err != nil {
					return err
				}
				fmt.Fprintf(cmd.OutOrStdout(), "sha256 = \"%x\" # %s\n", sha256.Sum256(module), path)
			}
			return nil
		},
	}
}
