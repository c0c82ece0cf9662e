package command

import (
	"cmp"
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/regular"
)

func newPolicyPack() *cobra.Command {
	var manifest, out string
	cmd := &cobra.Command{
		Use:   "pack FILE",
		Short: "Put a manifest into a module",
		Long: `Puts a manifest into a module as the custom section ` + abi.ManifestSection + `, in place of an old one. It is meant for
toolchains that cannot write custom sections, and for use after tools that strip them. The manifest is checked first.`,
		Example: "  kvhost policy pack mine.wasm --manifest manifest.json",
		Args:    wantArgs(1, "one .wasm file"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return pack(cmd.Context(), args[0], manifest, cmp.Or(out, args[0]))
		},
	}
	cmd.Flags().StringVar(&manifest, "manifest", "manifest.json", "the manifest")
	cmd.Flags().StringVarP(&out, "out", "o", "", "where to write the module (default: in place)")
	return cmd
}

func pack(ctx context.Context, path, manifest, out string) error {
	text, err := regular.ReadFile(ctx, manifest, abi.MaxManifestBytes)
	if err != nil {
		return err
	}
	if _, err := abi.ParseManifest(text); err != nil {
		return fmt.Errorf("%s: %w", manifest, err)
	}
	module, err := regular.ReadFile(ctx, path, sandbox.MaxModuleBytes)
	if err != nil {
		return err
	}
	if module, err = abi.WithCustomSection(module, abi.ManifestSection, text); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return regular.Replace(out, module, 0o644)
}
