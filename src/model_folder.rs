//! The folder of the bundled model.

use std::path::{Path, PathBuf};

const SHIPPED: &str = "models/tilewright-small";

/// The bundled model's folder: searched below the working directory, the executable's ancestors, and the build directory.
pub(crate) fn shipped() -> Option<PathBuf> {
    let program = std::env::current_exe().ok();
    let ancestors = program.iter().flat_map(|path| path.ancestors().skip(1).take(3));
    let roots = [Path::new(".")].into_iter().chain(ancestors).chain([Path::new(env!("CARGO_MANIFEST_DIR"))]);
    roots.map(|root| root.join(SHIPPED)).find(|dir| dir.is_dir())
}
