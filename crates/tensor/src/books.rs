//! What kernels would have done on a device that only knows sizes: by part of the model and phase of a step, the launches
//! of each kernel with the bytes it would have read and written, and the multiply-adds of products.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard};

/// The launches of one kernel from one part of the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Launches {
    pub count: u64,
    /// Of all operands, each once a launch, unless the kernel looks at parts of them or comes back to them.
    pub bytes: u64,
}

/// A phase of a training step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// Forward, and whatever is neither of the others.
    #[default]
    Forward,
    /// Forward once more, of what was not kept.
    Recompute,
    Backward,
    /// The optimizer's, and what follows it. Nothing here enters it: whoever walks a step does.
    Update,
}

/// Work of one part of the model in one phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Of matrix products, attention's among them.
    pub multiply_adds: u64,
    /// Read and written by these products: each operand once, attention's operands once a kernel.
    pub product_bytes: u64,
    /// Read and written by all other kernels.
    pub other_bytes: u64,
}

/// Launches and products so far.
#[derive(Debug)]
pub struct Books(Mutex<Pages>);

#[derive(Debug)]
struct Pages {
    scopes: HashMap<String, usize>,
    /// By number of a scope.
    pages: Vec<BTreeMap<Phase, Page>>,
    scope: usize,
    phase: Phase,
    /// How often what is noted now happens.
    times: u64,
}

#[derive(Debug, Default)]
struct Page {
    launches: BTreeMap<&'static str, Launches>,
    /// Of matrix products, attention's aside.
    multiply_adds: u64,
    product_bytes: u64,
    /// Of attention.
    attended: u64,
}

/// Kernels whose bytes are those of their products.
pub(crate) const PRODUCTS: [&str; 9] = [
    "multiply_into",
    "linear",
    "weight_gradient",
    "grouped_multiply",
    "grouped_weight_gradient",
    "gate_and_up",
    "swiglu_experts",
    "from_gate_and_up",
    "swiglu_experts_back",
];
/// Kernels that are products of their own.
const ATTENTION: [&str; 4] = ["attention", "attention_back", "relative_attention", "relative_attention_back"];

impl Default for Books {
    fn default() -> Books {
        let (scopes, pages) = (HashMap::from([(String::new(), 0)]), vec![BTreeMap::new()]);
        Books(Mutex::new(Pages { scopes, pages, scope: 0, phase: Phase::Forward, times: 1 }))
    }
}

impl Books {
    /// By part of the model and kernel.
    pub fn launches(&self) -> BTreeMap<(String, &'static str), Launches> {
        let mut sums = BTreeMap::<_, Launches>::new();
        self.each(|scope, _, page| {
            for (kernel, launches) in &page.launches {
                let sum = sums.entry((scope.to_owned(), *kernel)).or_default();
                sum.count += launches.count;
                sum.bytes += launches.bytes;
            }
        });
        sums
    }

    /// Of matrix products, attention's aside, by part of the model.
    pub fn multiply_adds(&self) -> BTreeMap<String, u64> {
        let mut sums = BTreeMap::new();
        self.each(|scope, _, page| *sums.entry(scope.to_owned()).or_default() += page.multiply_adds);
        sums
    }

    /// All work by part of the model and phase.
    pub fn work(&self) -> BTreeMap<(String, Phase), Work> {
        let mut all = BTreeMap::<_, Work>::new();
        self.each(|scope, phase, page| {
            let bytes = |is: &dyn Fn(&str) -> bool| -> u64 {
                page.launches.iter().filter(|(kernel, _)| is(kernel)).map(|(_, launches)| launches.bytes).sum()
            };
            let attention = |kernel: &str| ATTENTION.contains(&kernel);
            let work = all.entry((scope.to_owned(), phase)).or_default();
            work.multiply_adds += page.multiply_adds + page.attended;
            work.product_bytes += page.product_bytes + bytes(&attention);
            work.other_bytes += bytes(&|kernel| !PRODUCTS.contains(&kernel) && !attention(kernel));
        });
        all
    }

    fn each(&self, mut f: impl FnMut(&str, Phase, &Page)) {
        let pages = self.pages();
        for (scope, &number) in &pages.scopes {
            pages.pages[number].iter().for_each(|(phase, page)| f(scope, *phase, page));
        }
    }

    /// The phase of the step that what follows belongs to.
    pub fn set_phase(&self, phase: Phase) {
        self.pages().phase = phase;
    }

    pub fn phase(&self) -> Phase {
        self.pages().phase
    }

    /// What follows stands for so many like it.
    pub fn set_times(&self, times: u64) {
        self.pages().times = times;
    }

    /// How many what happens now stands for.
    pub fn times(&self) -> u64 {
        self.pages().times
    }

    pub(crate) fn set_scope(&self, scope: &str) {
        let mut pages = self.pages();
        pages.scope = match pages.scopes.get(scope) {
            Some(&number) => number,
            None => {
                let number = pages.pages.len();
                pages.pages.push(BTreeMap::new());
                pages.scopes.insert(scope.to_owned(), number);
                number
            }
        };
    }

    pub(crate) fn launch(&self, kernel: &'static str, bytes: usize) {
        let mut pages = self.pages();
        let times = pages.times;
        let launches = pages.page().launches.entry(kernel).or_default();
        launches.count += times;
        launches.bytes += bytes as u64 * times;
    }

    /// A product of `rows` by `inner` by `cols`, in f32.
    pub(crate) fn add_product(&self, [rows, inner, cols]: [u64; 3]) {
        let mut pages = self.pages();
        let times = pages.times;
        let page = pages.page();
        page.multiply_adds += rows * inner * cols * times;
        page.product_bytes += 4 * (rows * inner + inner * cols + rows * cols) * times;
    }

    pub(crate) fn add_attended(&self, multiply_adds: u64) {
        let mut pages = self.pages();
        let times = pages.times;
        pages.page().attended += multiply_adds * times;
    }

    fn pages(&self) -> MutexGuard<'_, Pages> {
        // Counters are never half written.
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Pages {
    fn page(&mut self) -> &mut Page {
        self.pages[self.scope].entry(self.phase).or_default()
    }
}
