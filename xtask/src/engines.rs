//! `cargo xtask candle` and `cargo xtask package`: the workspace of adapters, and the packages of the library crates. Neither is a
//! step of CI: each compiles dependencies for minutes.

use crate::{
    steps::{CargoStep, timed},
    target,
};
use std::path::Path;

const ADAPTERS: [CargoStep<'_>; 4] = [
    CargoStep { name: "format", arguments: &["fmt", "--all", "--check"], environment: &[] },
    CargoStep {
        name: "clippy",
        arguments: &["clippy", "--locked", "--workspace", "--all-targets", "--", "-D", "warnings"],
        environment: &[],
    },
    CargoStep { name: "test", arguments: &["test", "--locked", "--workspace"], environment: &[] },
    CargoStep {
        name: "example",
        arguments: &["run", "--locked", "--package", "candle-llama"],
        environment: &[],
    },
];

/// Library crates of the main workspace.
const LIBRARIES: [&str; 5] =
    ["tilewright", "tilewright-ptx", "tilewright-kernels", "tilewright-cuda", "tilewright-serve"];

/// Formats, lints and tests the workspace of `examples/`.
pub(crate) fn candle(root: &Path) -> Result<(), String> {
    let folder = root.join("examples");
    ADAPTERS.iter().try_for_each(|step| timed(step.name, || step.run(&folder)).map(drop))
}

/// Packages every library crate and builds it from its package.
pub(crate) fn package(root: &Path) -> Result<(), String> {
    let mut arguments = vec!["package", "--locked", "--allow-dirty"];
    arguments.extend(LIBRARIES.iter().flat_map(|name| ["--package", name]));
    let libraries = CargoStep { name: "libraries", arguments: &arguments, environment: &[] };
    timed(libraries.name, || libraries.run(root))?;

    // No registry has the libraries: the adapter builds with their packages, which the step above has unpacked.
    let packages = target(root).join("package");
    let patch = |name: &&str| {
        let version = env!("CARGO_PKG_VERSION");
        format!("patch.crates-io.{name}.path='{}'", packages.join(format!("{name}-{version}")).display())
    };
    let patches: Vec<String> = LIBRARIES.iter().map(patch).collect();
    let mut arguments = vec!["package", "--allow-dirty", "--package", "tilewright-candle"];
    arguments.extend(patches.iter().flat_map(|patch| ["--config", patch]));
    let adapter = CargoStep { name: "adapter", arguments: &arguments, environment: &[] };
    // cargo records unused patches in the lock file
    let lock = root.join("examples/Cargo.lock");
    let before = std::fs::read(&lock).map_err(|why| format!("cannot read {}: {why}", lock.display()))?;
    let outcome = timed(adapter.name, || adapter.run(&root.join("examples"))).map(drop);
    std::fs::write(&lock, before).map_err(|why| format!("cannot write {}: {why}", lock.display()))?;
    outcome
}
