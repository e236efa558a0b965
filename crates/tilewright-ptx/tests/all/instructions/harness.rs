//! Executes one instruction in its own kernel in the simulator. The lanes of one warp load their operands and store their
//! results.

use tilewright_ptx::{
    Access, Arg, Kernel, Launch, Memory, Op,
    ir::{Block, Condition, Inst, Operand, Param, ParamKind, Reg, Register, SharedArray, Stmt},
    isa::{
        Slot,
        memory::{Element, MemoryOp, Space},
        pure::PureOp,
        sync::{Special, SyncOp},
        types::Class,
    },
};

/// Bytes of private memory per lane.
pub(crate) const BYTES: usize = 64;
const LANES: usize = 32;

/// A lane's operands, excluding addresses.
pub(crate) type Values = Vec<u64>;

/// The results of each lane, and each lane's memory.
pub(crate) struct Outcome {
    pub(crate) results: Vec<Vec<u64>>,
    pub(crate) memory: Vec<Vec<u8>>,
}

struct Recorder {
    kernel: Kernel,
}

impl Recorder {
    fn register(&mut self, class: Class) -> Reg {
        let place = self.kernel.registers.len() as u32;
        self.kernel.registers.push(Register { class, name: format!("x{place}") });
        Reg(place)
    }

    fn inst(&self, op: Op, results: &[Reg], operands: &[Operand]) -> Stmt {
        let (results, operands) = (results.to_vec(), operands.to_vec());
        Stmt::Inst(Inst { op, results, operands, at: std::panic::Location::caller() })
    }

    fn push(&mut self, op: Op, class: Class, operands: &[Operand]) -> Operand {
        let reg = self.register(class);
        let inst = self.inst(op, &[reg], operands);
        self.kernel.body.push(inst);
        Operand::Reg(reg)
    }

    fn store(&mut self, element: Element, to: Operand, offset: usize, value: Operand) {
        let op = Op::Memory(MemoryOp::Store(Space::Global, element, 1, Access::Weak));
        let inst = self.inst(op, &[], &[to, Operand::Const(offset as u64), value]);
        self.kernel.body.push(inst);
    }
}

/// An empty kernel of one warp.
fn empty() -> Kernel {
    Kernel {
        name: "instruction".to_owned(),
        threads: LANES as u32,
        cluster: 1,
        ctas_per_sm: 1,
        params: ["memory", "values", "results"]
            .map(|name| Param { name: name.to_owned(), kind: ParamKind::Value(Class::B64) })
            .to_vec(),
        shared: vec![SharedArray { name: "shared".to_owned(), bytes: LANES * BYTES, align: 16 }],
        registers: Vec::new(),
        body: Vec::new(),
    }
}

/// Executes `op` in all lanes, or in lane 0 alone. Addresses point to the lane's own memory in the instruction's space;
/// `values` are the other operands.
pub(crate) fn execute(op: Op, alone: bool, memory: &[Vec<u8>], values: &[Values]) -> Outcome {
    let space = match op {
        Op::Memory(
            MemoryOp::Load(space, ..)
            | MemoryOp::Store(space, ..)
            | MemoryOp::Atomic(space, ..)
            | MemoryOp::Reduce(space, ..),
        ) => space,
        _ => Space::Global,
    };
    let form = op.form();
    let mut k = Recorder { kernel: empty() };
    let lane = k.push(Op::Sync(SyncOp::Special(Special::Lane)), Class::B32, &[]);
    let own = |k: &mut Recorder, param: usize| {
        let base = k.push(Op::Param(param), Class::B64, &[]);
        k.push(Op::Pure(PureOp::MadWideU32), Class::B64, &[lane, Operand::Const(BYTES as u64), base])
    };
    let [data, inputs, results] = [0, 1, 2].map(|param| own(&mut k, param));
    let shared = k.push(Op::SharedAddress(0), Class::B32, &[]);
    let shared = k.push(Op::Pure(PureOp::MadU32), Class::B32, &[lane, Operand::Const(BYTES as u64), shared]);
    if space != Space::Global {
        copy(&mut k, (Space::Global, data), (Space::Shared, shared));
    }
    let address = match space {
        Space::Global => data,
        Space::Shared => shared,
        Space::Cluster => k.push(Op::Sync(SyncOp::MapToCta), Class::B32, &[shared, Operand::Const(0)]),
    };
    let mut operands = Vec::new();
    let mut taken = 0;
    for slot in &form.operands {
        match *slot {
            Slot::Address(_) => operands.extend([address, Operand::Const(0)]),
            Slot::Immediate => operands.push(Operand::Const(0)),
            Slot::Value(class) | Slot::Register(class) => {
                operands.push(load_operand(&mut k, (inputs, 8 * taken), class));
                taken += 1;
            }
        }
    }
    let found: Vec<Reg> = form.results.iter().map(|&class| k.register(class)).collect();
    let before = k.kernel.body.len();
    let inst = k.inst(op, &found, &operands);
    k.kernel.body.push(inst);
    for (at, (&reg, &class)) in found.iter().zip(&form.results).enumerate() {
        store_result(&mut k, (results, 8 * at), (reg, class));
    }
    if alone {
        let then: Block = k.kernel.body.split_off(before);
        let first = k.push(Op::Pure(PureOp::EqU32), Class::Pred, &[lane, Operand::Const(0)]);
        let Operand::Reg(reg) = first else { unreachable!("just made") };
        let condition = Condition { reg, holds: true };
        let at = std::panic::Location::caller();
        k.kernel.body.push(Stmt::If { condition, then, otherwise: Vec::new(), at });
    }
    if space != Space::Global {
        copy(&mut k, (Space::Shared, shared), (Space::Global, data));
    }
    run(&k.kernel, memory, values, form.results.len())
}

/// Copies a lane's memory.
fn copy(k: &mut Recorder, from: (Space, Operand), to: (Space, Operand)) {
    for word in 0..BYTES / 8 {
        let offset = Operand::Const(8 * word as u64);
        let load = Op::Memory(MemoryOp::Load(from.0, Element::B64, 1, Access::Weak));
        let value = k.push(load, Class::B64, &[from.1, offset]);
        let store = Op::Memory(MemoryOp::Store(to.0, Element::B64, 1, Access::Weak));
        let inst = k.inst(store, &[], &[to.1, offset, value]);
        k.kernel.body.push(inst);
    }
}

/// Loads an operand from memory.
fn load_operand(k: &mut Recorder, (from, offset): (Operand, usize), class: Class) -> Operand {
    let (element, loaded) = match class {
        Class::B16 => (Element::B16, Class::B16),
        Class::B64 => (Element::B64, Class::B64),
        Class::B32 | Class::Pred => (Element::B32, Class::B32),
    };
    let load = Op::Memory(MemoryOp::Load(Space::Global, element, 1, Access::Weak));
    let value = k.push(load, loaded, &[from, Operand::Const(offset as u64)]);
    match class {
        Class::Pred => k.push(Op::Pure(PureOp::NeU32), Class::Pred, &[value, Operand::Const(0)]),
        _ => value,
    }
}

/// Stores a result to memory.
fn store_result(k: &mut Recorder, (to, offset): (Operand, usize), (reg, class): (Reg, Class)) {
    let reg = Operand::Reg(reg);
    match class {
        Class::Pred => {
            let word =
                k.push(Op::Pure(PureOp::SelB32), Class::B32, &[Operand::Const(1), Operand::Const(0), reg]);
            k.store(Element::B32, to, offset, word);
        }
        Class::B16 => k.store(Element::B16, to, offset, reg),
        Class::B32 => k.store(Element::B32, to, offset, reg),
        Class::B64 => k.store(Element::B64, to, offset, reg),
    }
}

fn run(kernel: &Kernel, memory: &[Vec<u8>], values: &[Values], results: usize) -> Outcome {
    tilewright_ptx::verify::check(kernel).unwrap_or_else(|why| panic!("{why}"));
    let mut device = Memory::new();
    let data = device.alloc_bytes(&memory.concat());
    let words =
        values.iter().flat_map(|of_lane| (0..BYTES / 8).map(|at| of_lane.get(at).copied().unwrap_or(0)));
    let inputs = device.alloc_from(&words.collect::<Vec<u64>>());
    let taken = device.alloc_from(&vec![0_u64; LANES * BYTES / 8]);
    let args = [data, inputs, taken].map(Arg::U64);
    let launch = Launch { kernel, grid: [1, 1, 1], args: &args, seed: 1 };
    launch.run(&mut device).unwrap_or_else(|fault| panic!("{fault}"));
    let taken: Vec<u64> = device.read(taken, LANES * BYTES / 8).unwrap_or_else(|fault| panic!("{fault}"));
    let words: Vec<u64> = device.read(data, LANES * BYTES / 8).unwrap_or_else(|fault| panic!("{fault}"));
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    Outcome {
        results: taken.chunks(BYTES / 8).map(|of_lane| of_lane[..results].to_vec()).collect(),
        memory: bytes.chunks(BYTES).map(<[u8]>::to_vec).collect(),
    }
}
