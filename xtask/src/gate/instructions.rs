//! One kernel per instruction, assembled for the first architecture and PTX version that support it. This verifies the
//! instruction tables.

use tilewright_ptx::{
    ir::{Inst, Kernel, Operand, Param, ParamKind, Reg, Register, SharedArray, Stmt},
    isa::{Op, Slot, types::Class},
};

/// A kernel that executes `op` on values unknown at compile time.
pub(crate) fn kernel_of(op: Op) -> Kernel {
    let mut kernel = Kernel {
        name: "instruction".to_owned(),
        threads: 128,
        cluster: 1,
        ctas_per_sm: 1,
        params: Vec::new(),
        shared: vec![SharedArray { name: "memory".to_owned(), bytes: 1024, align: 1024 }],
        registers: Vec::new(),
        body: Vec::new(),
    };
    let form = op.form();
    let mut operands = Vec::new();
    for slot in &form.operands {
        match *slot {
            Slot::Value(class) | Slot::Register(class) => operands.push(kernel.unknown(class)),
            Slot::Immediate => operands.push(Operand::Const(128)),
            Slot::Address(Class::B64) => operands.extend([kernel.unknown(Class::B64), Operand::Const(16)]),
            Slot::Address(class) => {
                let reg = kernel.register(class);
                kernel.push(Op::SharedAddress(0), vec![reg], Vec::new());
                operands.extend([Operand::Reg(reg), Operand::Const(0)]);
            }
        }
    }
    // MMAs accumulate into their results
    let results: Vec<Reg> = form
        .results
        .iter()
        .map(|&class| match kernel.unknown(class) {
            Operand::Reg(reg) => reg,
            Operand::Const(_) => kernel.register(class),
        })
        .collect();
    kernel.push(op, results, operands);
    kernel
}

/// Builder methods for a test kernel.
trait Trial {
    fn register(&mut self, class: Class) -> Reg;
    fn push(&mut self, op: Op, results: Vec<Reg>, operands: Vec<Operand>);
    /// A register with a value from a parameter.
    fn unknown(&mut self, class: Class) -> Operand;
}

impl Trial for Kernel {
    fn register(&mut self, class: Class) -> Reg {
        let place = self.registers.len() as u32;
        self.registers.push(Register { class, name: format!("x{place}") });
        Reg(place)
    }

    fn push(&mut self, op: Op, results: Vec<Reg>, operands: Vec<Operand>) {
        self.body.push(Stmt::Inst(Inst { op, results, operands, at: std::panic::Location::caller() }));
    }

    fn unknown(&mut self, class: Class) -> Operand {
        use tilewright_ptx::isa::pure::PureOp;
        let reg = self.register(class);
        if class == Class::Pred {
            let word = self.unknown(Class::B32);
            self.push(Op::Pure(PureOp::NeU32), vec![reg], vec![word, Operand::Const(0)]);
        } else {
            let name = format!("p{}", self.params.len());
            self.params.push(Param { name, kind: ParamKind::Value(class) });
            self.push(Op::Param(self.params.len() - 1), vec![reg], Vec::new());
        }
        Operand::Reg(reg)
    }
}
