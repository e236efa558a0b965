//! The instruction forms of a kernel, each built once: thousands of instructions share about forty forms.

use crate::{
    ir::Kernel,
    isa::{Form, Op, types::Since},
};
use rustc_hash::FxHashMap;
use std::ops::Index;

/// The form of every instruction in a kernel.
#[derive(Debug)]
pub(crate) struct Forms(FxHashMap<Op, Form>);

impl Forms {
    pub(crate) fn of(kernel: &Kernel) -> Self {
        let mut forms = FxHashMap::default();
        kernel.for_each(|inst| {
            forms.entry(inst.op).or_insert_with(|| inst.op.form());
        });
        Self(forms)
    }

    /// In no particular order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Op, &Form)> {
        self.0.iter().map(|(op, form)| (*op, form))
    }

    /// The first PTX version and architecture that support all forms and clusters of `cluster` CTAs, without the forms that `arch`
    /// omits.
    pub(crate) fn since(&self, cluster: u32, arch: u32) -> Since {
        let clusters = (cluster > 1).then(|| Since::new("7.8", "sm_90"));
        let printed = self.0.values().filter(|form| !form.is_omitted(arch));
        printed.map(|form| form.since).chain(clusters).fold(Since::new("7.0", "sm_80"), Since::and)
    }
}

impl Index<Op> for Forms {
    type Output = Form;

    /// The form of an instruction of this kernel.
    fn index(&self, op: Op) -> &Form {
        &self.0[&op]
    }
}
