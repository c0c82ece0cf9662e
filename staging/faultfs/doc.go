// Package faultfs is a test double of [staging.FS]: it injects errors, delays, hangs, short and torn transfers into the
// calls that its rules select. Rules have a text form, so that a test or a command line can state them in one line:
//
//	write /root/** 3rd: enospc
//
// It is to staging what errorfs is to pebble's vfs. Only tests import it.
package faultfs
