"""The nouns that composed prompts are about. Lists of common words; nothing here is taken from a benchmark."""

from __future__ import annotations

from typing import Final


def _list(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.replace("\n", " ").split(";") if item.strip())


WORDS: Final[dict[str, tuple[str, ...]]] = {
    "topic": _list(
        """renewable energy; remote work; healthy sleep; public libraries; urban gardening; electric bicycles; coral reefs;
        artificial intelligence; social media; school uniforms; space tourism; vegetarian diets; chess; street art;
        recycling; online learning; city traffic; houseplants; meditation; second-hand clothes; bees; volcanoes; the moon;
        coffee; jazz; board games; photography; personal budgets; marathon running; childhood friendships; rainforests;
        video games; cooking at home; long train rides; national parks; public speaking; time management; minimalism;
        solar panels; learning a language; dreams; museums; camping; community theatre; pets; winter sports; bread baking;
        bird watching; old maps; lighthouses; deserts; river floods; wind turbines; privacy online; robots in hospitals;
        volunteering; teamwork; honesty; failure; gratitude; curiosity; procrastination; stress at work; small businesses;
        farmers markets; universal basic income; advertising; newspapers; tea ceremonies; handwriting; architecture;
        fashion trends; self-driving cars; genetic engineering; vaccines; plastic waste; ocean currents; earthquakes;
        black holes; comets; ancient libraries; the printing press; the Silk Road; medieval castles; the steam engine;
        folk music; poetry; ballet; animated films; science fiction; detective stories; fairy tales; mountain climbing;
        sailing; swimming; football; yoga; nutrition labels; food allergies; first aid; home repairs; rental contracts;
        job interviews; customer complaints; weather forecasts; insurance; taxes; retirement savings; stock markets;
        inflation; cryptocurrencies; supply chains; quality control; open source software; computer viruses; passwords;
        cloud computing; smart homes; 3D printing; drones; telescopes; microscopes; magnets; batteries; bridges; tunnels"""
    ),
    "science": _list(
        """photosynthesis; gravity; evolution by natural selection; the water cycle; plate tectonics; electric current;
        magnetism; the greenhouse effect; cell division; DNA replication; the immune system; digestion; the nervous system;
        atomic structure; chemical bonds; acids and bases; oxidation; radioactive decay; entropy; sound waves; light
        refraction; buoyancy; friction; Newton's laws of motion; kinetic and potential energy; momentum; semiconductors;
        lasers; antibiotics; enzymes; hormones; ecosystems; food chains; symbiosis; tides; eclipses; the life cycle of a
        star; galaxies; the speed of light; special relativity; quantum tunnelling; superconductors; vaccines; heredity;
        mutations; osmosis; fermentation; combustion; crystals; polymers; nuclear fusion; ocean acidification; the carbon
        cycle; the ozone layer; hurricanes; lightning; rainbows; fossils; glaciers; soil erosion; pollination; photons;
        electromagnetic induction; capacitors; transistors; heat transfer; pressure; viscosity; Doppler shift; catalysis"""
    ),
    "humanities": _list(
        """the Renaissance; the Industrial Revolution; the French Revolution; the Roman Republic; the Cold War; the Great
        Depression; ancient Greece; the Ottoman Empire; the Enlightenment; feudalism; colonialism; the Magna Carta; the
        women's suffrage movement; the civil rights movement; the space race; the fall of the Berlin Wall; the Black Death;
        the Aztec Empire; the Ming dynasty; the Meiji Restoration; stoicism; utilitarianism; existentialism; social
        contract theory; empiricism; free will; the trolley problem; democracy; monarchy; federalism; human rights;
        international law; supply and demand; monopolies; game theory; globalization; urbanization; migration; myths;
        tragedy in drama; satire; romantic poetry; impressionism; baroque music; gothic architecture; oral tradition;
        linguistics; the invention of writing; trade unions; constitutional courts; the separation of powers; propaganda;
        education reform; religious tolerance; archaeology; opportunity cost; behavioural economics; cultural relativism"""
    ),
    "person": _list(
        """a pirate captain; a retired detective; a medieval blacksmith; a museum guide; a kindergarten teacher; a chef; a
        sports commentator; a grumpy wizard; a spaceship pilot; a tour guide in Rome; a career coach; a librarian; a doctor;
        a lawyer; a farmer; a time traveller from the year 2300; a talking cat; a robot who wants to paint; a journalist; a
        mountain guide; a jazz musician; an astronaut; a friendly ghost; a chess grandmaster; a fitness trainer; a gardener;
        a philosopher of ancient Athens; a stand-up comedian; a bank teller; a stage magician; a travel agent; a barista; a
        volcanologist; a knight; a sea turtle; a king who lost his crown; an old lighthouse keeper; a mayor; a poet; a nurse;
        a software engineer; a carpenter; an explorer in the Arctic; a customer support agent; a negotiator; a biologist; a
        film director; a fortune teller; a queen; a mathematician; a rock star; a therapist; a zookeeper; a firefighter"""
    ),
    "place": _list(
        """Paris; Tokyo; Cairo; New York; Rio de Janeiro; Sydney; Istanbul; Nairobi; Mumbai; Lisbon; Kyoto; Reykjavik; Rome;
        Mexico City; Cape Town; Vienna; Seoul; Havana; Marrakesh; Vancouver; Athens; Bangkok; Dublin; Prague; Lima; Oslo;
        a small fishing village; a desert town; an island; the Alps; the Amazon; a big city; a space station; a farm"""
    ),
    "thing": _list(
        """umbrella; bicycle; violin; backpack; teapot; lamp; mirror; key; clock; camera; notebook; kite; telescope; sofa;
        coffee machine; water bottle; winter coat; running shoes; robot vacuum; toaster; guitar; suitcase; candle; tent;
        pencil; smartphone; headphones; keyboard; chair; bookshelf; garden hose; puzzle; sandwich; pumpkin; snow globe"""
    ),
    "animal": _list(
        """elephant; octopus; hedgehog; owl; dolphin; fox; penguin; honey bee; wolf; parrot; tortoise; kangaroo; bat; cat;
        dog; horse; spider; ant; salmon; crow; whale; snake; frog; butterfly; rabbit; polar bear; camel; goat; chicken"""
    ),
    "name": _list(
        """Anna; Ben; Carlos; Dina; Emma; Farid; Grace; Hiro; Ines; Jack; Kofi; Lena; Maria; Noah; Olga; Priya; Quentin; Rosa;
        Sam; Tara; Umar; Vera; Will; Ximena; Yusuf; Zoe; Tom; Lucy; David; Sarah; Mike; Julia; Peter; Nadia; Leo; Mei"""
    ),
    "job": _list(
        """teacher; nurse; electrician; accountant; baker; designer; bus driver; data analyst; journalist; plumber; pilot;
        sales manager; web developer; photographer; architect; waiter; translator; pharmacist; gardener; police officer;
        project manager; intern; mechanic; dentist; social worker; marketing assistant; receptionist; scientist"""
    ),
    "product": _list(
        """reusable coffee cup; budgeting app; language-learning game; ergonomic chair; meal-kit service; smart lock; hiking
        boot; electric toothbrush; podcast about history; online chess club; pet-sitting service; bamboo phone case; noise
        machine; desk plant; folding bike; cooking class; fitness tracker; dog food; scented candle; book subscription"""
    ),
    "feeling": _list(
        """happy; sad; nervous; proud; lonely; angry; hopeful; bored; jealous; grateful; surprised; tired; excited; calm;
        homesick; confused; relieved; curious"""
    ),
    "style": _list(
        """formal; casual; humorous; persuasive; poetic; dramatic; simple; sarcastic; enthusiastic; polite; neutral;
        mysterious; romantic; academic; concise"""
    ),
    "form": _list(
        """short story; poem; haiku; sonnet; song; limerick; blog post; speech; diary entry; letter; dialogue; news article;
        product description; movie review; fable; monologue; advertisement; essay; email; press release; tweet; recipe;
        toast for a wedding; bedtime story; opening paragraph of a novel; cover letter; invitation; slogan; script; riddle"""
    ),
    "language": _list("""French; Spanish; German; Italian; Portuguese; Dutch; Latin; Swedish"""),
    "code_language": _list(
        """Python; Python; Python; Python; Python; JavaScript; JavaScript; Java; C++; C; SQL; HTML; Bash; Rust; Go; TypeScript"""
    ),
    "code_task": _list(
        """reverses a string; checks whether a number is prime; sorts a list of dictionaries by a key; counts words in a file;
        finds duplicates in a list; merges two sorted lists; computes the factorial of a number; prints the Fibonacci
        sequence; checks whether a string is a palindrome; converts Celsius to Fahrenheit; validates an email address; reads
        a CSV file and prints the average of a column; finds the longest word in a sentence; implements binary search;
        implements a stack; implements a queue with two stacks; implements a linked list; removes vowels from a text; counts
        the frequency of each letter; finds the second largest number in a list; checks whether two strings are anagrams;
        generates a random password; flattens a nested list; transposes a matrix; multiplies two matrices; computes the
        greatest common divisor; converts a number to binary; parses a date; fetches a web page and prints its title; plays
        rock, paper, scissors; simulates rolling two dice; implements bubble sort; implements quicksort; implements merge
        sort; traverses a binary tree; finds the depth of a tree; finds the shortest path in a graph; computes the median of
        a list; rotates a list by k places; caches the results of a function; retries a failing request; counts lines in all
        files of a folder; renames files in a folder; draws a triangle of stars; converts Roman numerals; sums the digits of
        a number; finds all pairs that add up to a target; groups words by their first letter; removes whitespace; writes a
        dictionary to a JSON file; measures the running time of a function; computes compound interest; implements a bank
        account class; implements a shopping cart; implements a to-do list; implements tic-tac-toe; solves a maze; finds the
        intersection of two lists; computes the edit distance of two strings; checks balanced parentheses; encrypts text
        with a Caesar cipher; splits a list into chunks; generates prime numbers with a sieve; evaluates an arithmetic
        expression; finds missing numbers in a sequence; implements an LRU cache; counts set bits; merges two dictionaries"""
    ),
    "code_idea": _list(
        """recursion; a hash table; list comprehensions; decorators; generators; inheritance; polymorphism; closures; pointers;
        garbage collection; threads and processes; deadlocks; unit tests; version control; dependency injection; big O
        notation; dynamic programming; REST APIs; SQL joins; database indexes; regular expressions; exceptions; lambda
        functions; mutable and immutable types; type hints; context managers; asynchronous programming; sorting algorithms;
        breadth-first search; binary trees; heaps; linked lists; caching; load balancing; encryption; containers; CSS grid;
        the event loop; virtual environments; memory leaks; code review; design patterns; the singleton pattern"""
    ),
}
