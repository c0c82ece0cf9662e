// Package faultfs has test doubles of [staging.FS], and the tests that every implementation runs ([RunSuite]). [FS] injects
// errors, delays, hangs, short and torn transfers into the calls that its rules select. Rules have a text form, so that a
// test or a command line can state them in one line:
//
//	write /root/** 3rd: enospc
//
// It is to staging what errorfs is to pebble's vfs. [Machine] records what is not yet durable and, on [Machine.PowerLoss],
// discards a random part of it, as a crash would. Only tests import the package.
package faultfs
