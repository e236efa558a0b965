//! The bundle of machine code, and whether the driver loads its code.

use super::gpu::first_driver;
use crate::plan::counted;
use serde::Serialize;
use std::{
    fmt,
    path::{Path, PathBuf},
};
use tilewright_cuda::cache::{BUNDLE_FOLDER, BundleContent, Settings};

/// A bundle, or the reason why there is none.
#[derive(Serialize)]
pub(super) struct Bundle {
    folder: Option<PathBuf>,
    kernels: usize,
    damaged: usize,
    targets: Vec<String>,
    assemblers: Vec<String>,
    /// Why it is not used: it is missing, or the driver refuses its code.
    why: Option<String>,
}

/// Reads the bundle in `folder`, by default that beside the program.
pub(super) fn find(folder: Option<&Path>) -> Bundle {
    let settings = Settings::from_environment().ok();
    let beside = || settings.as_ref()?.optional_bundle_folder().map(Path::to_owned);
    let folder = folder.map(Path::to_owned).or_else(beside);
    let mut content = BundleContent::default();
    let why = match folder.as_deref().map(BundleContent::read) {
        None => Some("the cache is off".to_owned()),
        Some(Err(why)) => Some(why.to_string()),
        Some(Ok(found)) => {
            content = found;
            first_driver().and_then(|driver| driver.refusal(&content))
        }
    };
    let BundleContent { kernels, damaged, targets, assemblers, .. } = content;
    let list = |set: std::collections::BTreeSet<String>| set.into_iter().collect();
    Bundle { folder, kernels, damaged, targets: list(targets), assemblers: list(assemblers), why }
}

impl fmt::Display for Bundle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(folder) = self.folder.as_ref().filter(|_| self.kernels + self.damaged > 0) else {
            return write!(f, "none; `tilewright kernels bundle` makes {BUNDLE_FOLDER} beside a program");
        };
        let (kernels, targets) = (counted(self.kernels, "kernel"), self.targets.join(", "));
        write!(f, "{}: {kernels} for {targets} by {}", folder.display(), self.assemblers.join(", "))?;
        if self.damaged > 0 {
            write!(f, "; {} damaged", counted(self.damaged, "file"))?;
        }
        match &self.why {
            Some(why) => write!(f, "; the driver refuses them and compiles kernels itself: {why}"),
            None => Ok(()),
        }
    }
}
